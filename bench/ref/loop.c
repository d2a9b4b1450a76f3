/* Runs a command line over and over from JOBS threads for SECONDS and prints count, seconds, latencies as JSON.
 *
 *   loop SECONDS JOBS PREFIX COMMAND [ARGUMENT]...
 *
 * `{}` as an argument is replaced by a name that is new each time (PREFIX and a number). vfork and exec, so the driver
 * itself costs next to nothing beside what it measures. A command that fails ends the program.
 */
#include "kernel.h"

#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>

enum { JOBS_MAX = 64, ARGUMENTS_MAX = 128, SAMPLES_MAX = 200000, NAME_BYTES = 96 };

extern char **environ;

struct job {
    pthread_t thread;
    int number, count;
    double *samples_us;
};

static uint64_t until_ns;
static const char *prefix;
static char **command;

static void run_once(const struct job *job)
{
    char name[NAME_BYTES], *argv[ARGUMENTS_MAX + 1];
    int i, status;
    pid_t pid;
    snprintf(name, sizeof name, "%s-%d-%d", prefix, job->number, job->count);
    for (i = 0; command[i] && i < ARGUMENTS_MAX; i++)
        argv[i] = strcmp(command[i], "{}") ? command[i] : name;
    argv[i] = NULL;
    errno = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);
    must(errno ? -1 : 0);
    must(waitpid(pid, &status, 0));
    if (status) {
        dprintf(2, "loop: %s failed with status %#x\n", argv[0], (unsigned)status);
        _exit(1);
    }
}

static void *job_main(void *argument)
{
    struct job *job = argument;
    uint64_t begin;
    while (job->count < SAMPLES_MAX && (begin = now_ns()) < until_ns) {
        run_once(job);
        job->samples_us[job->count++] = (double)(now_ns() - begin) / 1000.0;
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static struct job all[JOBS_MAX];
    int jobs = argc > 4 ? atoi(argv[2]) : 0, count = 0;
    double seconds = argc > 4 ? atof(argv[1]) : 0;
    if (jobs < 1 || jobs > JOBS_MAX || seconds <= 0) {
        dprintf(2, "loop SECONDS JOBS PREFIX COMMAND [ARGUMENT]...\n");
        return 2;
    }
    prefix = argv[3], command = argv + 4;
    uint64_t begin = now_ns();
    until_ns = begin + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < jobs; i++) {
        all[i].number = i;
        all[i].samples_us = calloc(SAMPLES_MAX, sizeof(double));
        errno = pthread_create(&all[i].thread, NULL, job_main, &all[i]);
        must(errno ? -1 : 0);
    }
    for (int i = 0; i < jobs; i++)
        pthread_join(all[i].thread, NULL), count += all[i].count;
    printf("{\"count\": %d, \"seconds\": %.6f, \"latencies_us\": [", count, (double)(now_ns() - begin) / 1e9);
    const char *comma = "";
    for (int i = 0; i < jobs; i++)
        for (int j = 0; j < all[i].count; j++, comma = ", ")
            printf("%s%.1f", comma, all[i].samples_us[j]);
    printf("]}\n");
    return 0;
}
