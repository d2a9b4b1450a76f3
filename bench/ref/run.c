/* A run: entering a sandbox from outside, in a cgroup of its own, with its output in pipes. */
#include "kernel.h"
#include "sandbox.h"

#include <sched.h>
#include <sys/wait.h>

struct enter {
    const struct sandbox *sandbox;
    int v1[V1_MAX], v1_count, output[2];
    char *stack;
    pid_t program;
};

static int exec_main(const struct enter *enter)
{
    static char *const argv[] = {"true", NULL}, *const env[] = {"PATH=/usr/bin:/bin", NULL};
    must(syscall(SYS_setresgid, 0, 0, 0));
    must(syscall(SYS_setresuid, 0, 0, 0));
    must(chdir("/"));
    must(dup2(enter->output[0], 1));
    must(dup2(enter->output[1], 2));
    must(execve("/bin/true", argv, env));
    return 1;
}

/* Runs on the caller's memory (vfork): joins the sandbox, starts the program as the caller's child, ends. */
static int enter_main(struct enter *enter)
{
    for (int i = 0; i < enter->v1_count; i++)
        must(write(enter->v1[i], "0", 1));
    must(sys_setns(enter->sandbox->pidfd, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC |
                                              CLONE_NEWNET | CLONE_NEWCGROUP));
    enter->program =
        (pid_t)must(clone((int (*)(void *))exec_main, enter->stack + VFORK_STACK_BYTES,
                          CLONE_VM | CLONE_VFORK | CLONE_PARENT | SIGCHLD, enter));
    return 0;
}

/* glibc wraps clone, which cannot place the child in a cgroup, but not clone3, which can. */
static long clone3_call(struct clone_args *args, int (*function)(void *), void *argument)
{
#if defined(__x86_64__)
    register int (*fn)(void *) __asm__("r8") = function;
    register void *arg __asm__("r9") = argument;
    long result;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %%r9, %%rdi\n\t"
                     "call *%%r8\n\t"
                     "mov %%eax, %%edi\n\t"
                     "mov %[exit], %%eax\n\t"
                     "syscall\n\t"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone3), "D"(args), "S"(sizeof *args), "r"(fn), "r"(arg), [exit] "i"(SYS_exit)
                     : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long number __asm__("x8") = SYS_clone3;
    register long result __asm__("x0") = (long)args;
    register long size __asm__("x1") = sizeof *args;
    register int (*fn)(void *) __asm__("x10") = function;
    register void *arg __asm__("x11") = argument;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x0, x11\n\t"
                     "blr x10\n\t"
                     "mov x8, %[exit]\n\t"
                     "svc #0\n\t"
                     "1:"
                     : "+r"(result)
                     : "r"(number), "r"(size), "r"(fn), "r"(arg), [exit] "i"(SYS_exit)
                     : "memory", "x30");
#else
#error "the reference knows x86-64 and aarch64"
#endif
    if (result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

static void reap(pid_t pid)
{
    siginfo_t info = {0};
    must(sys_waitid(P_PID, pid, &info, WEXITED));
    must(info.si_code == CLD_EXITED && info.si_status == 0 ? 0 : -1);
}

void sandbox_run(struct setup *setup, struct worker *worker, const struct sandbox *sandbox)
{
    char path[64], buffer[4096];
    int out[2], err[2];
    struct enter enter = {.sandbox = sandbox, .v1_count = setup->v1_count, .stack = worker->stack_exec};
    snprintf(path, sizeof path, "s%d/payload/r%u-%d", sandbox->id, worker->random, worker->runs++);
    must(mkdirat(setup->v2_fd, path, 0755));
    int cgroup = (int)must(openat(setup->v2_fd, path, O_PATH | O_DIRECTORY | O_CLOEXEC));
    char procs[64];
    snprintf(procs, sizeof procs, "s%d/cgroup.procs", sandbox->id);
    for (int i = 0; i < setup->v1_count; i++)
        enter.v1[i] = (int)must(openat(setup->v1_fd[i], procs, O_WRONLY | O_CLOEXEC));
    must(pipe2(out, O_CLOEXEC));
    must(pipe2(err, O_CLOEXEC));
    enter.output[0] = out[1], enter.output[1] = err[1];
    struct clone_args args = {.flags = CLONE_VM | CLONE_VFORK | CLONE_INTO_CGROUP,
                              .cgroup = (uint64_t)cgroup,
                              .stack = (uint64_t)(uintptr_t)worker->stack_enter,
                              .stack_size = VFORK_STACK_BYTES,
                              .exit_signal = SIGCHLD};
    pid_t helper = (pid_t)must(clone3_call(&args, (int (*)(void *))enter_main, &enter));
    close(out[1]), close(err[1]);
    reap(helper);
    reap(enter.program);
    while (must(read(out[0], buffer, sizeof buffer)) > 0 || must(read(err[0], buffer, sizeof buffer)) > 0)
        ;
    close(out[0]), close(err[0]), close(cgroup);
    for (int i = 0; i < setup->v1_count; i++)
        close(enter.v1[i]);
    remove_cgroup(setup->v2_fd, path);
}
