/* The reference: sandboxes of raw kernel calls, driven by lines on standard input.
 *
 *   cycle SECONDS JOBS   create + run(true) + stop, over and over
 *   create COUNT JOBS    create that many, and keep them
 *   run SECONDS JOBS     run(true) in sandboxes kept, chosen at random
 *   stop JOBS            stop all that are kept
 *
 * Each is answered by one line of JSON: count, seconds, latencies_us.
 */
#include "kernel.h"
#include "sandbox.h"

#include <pthread.h>

enum { JOBS_MAX = 64, SANDBOXES_MAX = 100000, SAMPLES_MAX = 1000000 };

struct job {
    pthread_t thread;
    void (*step)(struct job *);
    uint64_t until_ns; /* 0: until its share is done */
    struct worker worker;
    double *samples_us;
    int count, first, last; /* the share: sandboxes [first, last) of the table */
};

static struct setup setup;
static struct sandbox table[SANDBOXES_MAX];
static int alive, next_id;

static int new_id(void)
{
    return __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
}

static void step_cycle(struct job *job)
{
    struct sandbox sandbox;
    sandbox_create(&setup, &sandbox, new_id());
    sandbox_run(&setup, &job->worker, &sandbox);
    sandbox_stop(&setup, &sandbox);
}

static void step_create(struct job *job)
{
    sandbox_create(&setup, &table[job->first + job->count], new_id());
}

static void step_run(struct job *job)
{
    job->worker.random = job->worker.random * 1103515245u + 12345u;
    sandbox_run(&setup, &job->worker, &table[(job->worker.random >> 8) % (unsigned)alive]);
}

static void step_stop(struct job *job)
{
    sandbox_stop(&setup, &table[job->first + job->count]);
}

static void *job_main(void *argument)
{
    struct job *job = argument;
    worker_start(&job->worker, (unsigned)(now_ns() ^ (uintptr_t)job));
    while (job->count < SAMPLES_MAX) {
        uint64_t begin = now_ns();
        if (job->until_ns ? begin >= job->until_ns : job->first + job->count >= job->last)
            break;
        job->step(job);
        job->samples_us[job->count++] = (double)(now_ns() - begin) / 1000.0;
    }
    free(job->worker.stack_enter), free(job->worker.stack_exec);
    return NULL;
}

static void perform(const char *name, void (*step)(struct job *), double seconds, int first, int total, int jobs)
{
    static struct job all[JOBS_MAX];
    uint64_t begin = now_ns();
    for (int i = 0; i < jobs; i++) {
        long most = seconds > 0 ? (long)(seconds * 20000) + 1000 : total / jobs + 2;
        all[i] = (struct job){.step = step,
                              .until_ns = seconds > 0 ? begin + (uint64_t)(seconds * 1e9) : 0,
                              .samples_us = calloc((size_t)(most < SAMPLES_MAX ? most : SAMPLES_MAX), sizeof(double)),
                              .first = first + (int)((long)total * i / jobs),
                              .last = first + (int)((long)total * (i + 1) / jobs)};
        errno = pthread_create(&all[i].thread, NULL, job_main, &all[i]);
        must(errno ? -1 : 0);
    }
    int count = 0;
    for (int i = 0; i < jobs; i++) {
        pthread_join(all[i].thread, NULL);
        count += all[i].count;
    }
    printf("{\"op\": \"%s\", \"count\": %d, \"seconds\": %.6f, \"latencies_us\": [", name, count,
           (double)(now_ns() - begin) / 1e9);
    const char *comma = "";
    for (int i = 0; i < jobs; i++) {
        for (int j = 0; j < all[i].count; j++, comma = ", ")
            printf("%s%.1f", comma, all[i].samples_us[j]);
        free(all[i].samples_us);
    }
    printf("]}\n");
    fflush(stdout);
}

static void usage(void)
{
    dprintf(2, "reference --work DIR --v2 DIR [--v2-limits] [--v1 DIR]... [--tmpfs] --layer PATH...\n"
               "commands on standard input: cycle SECONDS JOBS | create COUNT JOBS | run SECONDS JOBS | stop JOBS\n");
    exit(2);
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--v2-limits")) {
            setup.v2_limits = true;
        } else if (!strcmp(argv[i], "--tmpfs")) {
            setup.upper_tmpfs = true;
        } else if (!value) {
            usage();
        } else if (!strcmp(argv[i], "--work")) {
            setup.work = value, i++;
        } else if (!strcmp(argv[i], "--v2")) {
            setup.v2 = value, i++;
        } else if (!strcmp(argv[i], "--v1") && setup.v1_count < V1_MAX) {
            setup.v1[setup.v1_count++] = value, i++;
        } else if (!strcmp(argv[i], "--layer") && setup.layer_count < LAYERS_MAX) {
            setup.layers[setup.layer_count++] = value, i++;
        } else {
            usage();
        }
    }
    if (!setup.work || !setup.v2 || !setup.layer_count)
        usage();
}

int main(int argc, char **argv)
{
    char line[256];
    double seconds;
    int count, jobs = 1;
    parse(argc, argv);
    setup_start(&setup);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "cycle %lf %d", &seconds, &jobs) == 2 && jobs > 0 && jobs <= JOBS_MAX) {
            perform("cycle", step_cycle, seconds, 0, 0, jobs);
        } else if (sscanf(line, "create %d %d", &count, &jobs) == 2 && jobs > 0 && jobs <= JOBS_MAX && count > 0 &&
                   alive + count <= SANDBOXES_MAX) {
            perform("create", step_create, 0, alive, count, jobs);
            alive += count;
        } else if (sscanf(line, "run %lf %d", &seconds, &jobs) == 2 && jobs > 0 && jobs <= JOBS_MAX && alive > 0) {
            perform("run", step_run, seconds, 0, 0, jobs);
        } else if (sscanf(line, "stop %d", &jobs) == 1 && jobs > 0 && jobs <= JOBS_MAX) {
            perform("stop", step_stop, 0, 0, alive, jobs);
            alive = 0;
        } else {
            usage();
        }
    }
    return 0;
}
