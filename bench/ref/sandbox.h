/* One sandbox made of raw kernel calls, with the parts a production one has. */
#ifndef BENCH_SANDBOX_H
#define BENCH_SANDBOX_H

#include <stdbool.h>
#include <sys/types.h>

enum { LAYERS_MAX = 8, V1_MAX = 4, VFORK_STACK_BYTES = 64 * 1024, UID_BASE = 0x10000000, UID_RANGE = 65536 };

/* A limit of a cgroup: a file and what is written to it. */
struct limit {
    const char *file;
    const char *value;
};

struct setup {
    const char *work;               /* a directory of ours; uppers go below it */
    const char *layers[LAYERS_MAX]; /* EROFS images or directories, lowest first */
    int layer_count;
    bool upper_tmpfs; /* the writable part: tmpfs, or a directory below work */
    const char *v2;   /* the cgroup v2 directory sandboxes go into */
    bool v2_limits;   /* v2 has the controllers */
    const char *v1[V1_MAX]; /* the directories in v1 hierarchies (memory, cpu, pids) */
    int v1_count;

    int v2_fd, v1_fd[V1_MAX], upper_fd; /* opened by setup_start */
};

struct sandbox {
    int id;
    int pidfd; /* of its init */
};

/* What one thread needs of its own. */
struct worker {
    unsigned random;
    int runs;
    char *stack_enter, *stack_exec;
};

void remove_cgroup(int dir, const char *path);
void setup_start(struct setup *setup);
void worker_start(struct worker *worker, unsigned seed);
void sandbox_create(struct setup *setup, struct sandbox *sandbox, int id);
void sandbox_run(struct setup *setup, struct worker *worker, const struct sandbox *sandbox);
void sandbox_stop(struct setup *setup, const struct sandbox *sandbox);

#endif
