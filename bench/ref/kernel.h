/* The system calls glibc has no wrapper for, or whose wrapper does more than one thread may see. */
#ifndef BENCH_KERNEL_H
#define BENCH_KERNEL_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* A step that fails ends the program: a figure of a half-made sandbox is worse than none. */
#define must(call)                                                                                                     \
    ({                                                                                                                 \
        long must_result = (long)(call);                                                                               \
        if (must_result < 0) {                                                                                         \
            dprintf(2, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, strerror(errno));                                 \
            _exit(1);                                                                                                  \
        }                                                                                                              \
        must_result;                                                                                                   \
    })

static inline int sys_fsopen(const char *type)
{
    return (int)syscall(SYS_fsopen, type, 1 /* FSOPEN_CLOEXEC */);
}

static inline int sys_fsconfig(int fd, unsigned cmd, const char *key, const void *value, int aux)
{
    return (int)syscall(SYS_fsconfig, fd, cmd, key, value, aux);
}

static inline int sys_fsmount(int fd, unsigned attributes)
{
    return (int)syscall(SYS_fsmount, fd, 1 /* FSMOUNT_CLOEXEC */, attributes);
}

static inline int sys_open_tree(int dir, const char *path, unsigned flags)
{
    return (int)syscall(SYS_open_tree, dir, path, flags | OPEN_TREE_CLOEXEC);
}

static inline int sys_move_mount(int from, int to_dir, const char *to)
{
    return (int)syscall(SYS_move_mount, from, "", to_dir, to, MOVE_MOUNT_F_EMPTY_PATH);
}

static inline int sys_mount_setattr(int fd, struct mount_attr *attr)
{
    return (int)syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, attr, sizeof *attr);
}

static inline int sys_setns(int fd, int flags)
{
    return (int)syscall(SYS_setns, fd, flags);
}

static inline int sys_close_range(unsigned first, unsigned last, unsigned flags)
{
    return (int)syscall(SYS_close_range, first, last, flags);
}

static inline int sys_waitid(int type, int id, siginfo_t *info, int options)
{
    return (int)syscall(SYS_waitid, type, id, info, options, NULL);
}

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
