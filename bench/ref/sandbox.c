/* One sandbox made of raw kernel calls.
 *
 * It has: user, mount, pid, uts, ipc, cgroup and network namespaces; an overlay of the layers, made in the initial user
 * namespace over idmapped detached mounts; /proc, a small /dev, pivot_root; a v2 cgroup tree, and the memory, cpu and
 * pids hierarchies of v1 where v2 lacks the controllers; an init that reaps. A run enters from outside, in a cgroup of
 * its own, with its output in pipes. It leaves out what a product adds on top (seccomp, masked paths, capabilities,
 * /sys, devpts, files in /etc, an exact disk limit, durability, a protocol), so the comparison errs against the product.
 */
#include "kernel.h"
#include "sandbox.h"

#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define SECBIT_NO_SETUID_FIXUP (1 << 2)

/* What v2 with controllers gets on the sandbox's directory, and what the v1 hierarchies get: the same limits. */
static const struct limit V2_LIMITS[] = {
    {"memory.max", "536870912"}, {"cpu.max", "100000 100000"}, {"pids.max", "4096"}, {NULL, NULL}};
static const struct limit V1_LIMITS[] = {{"memory.limit_in_bytes", "536870912"},
                                         {"cpu.cfs_quota_us", "100000"},
                                         {"pids.max", "4096"},
                                         {NULL, NULL}};

static void write_at(int dir, const char *path, const char *text)
{
    int fd = (int)must(openat(dir, path, O_WRONLY | O_CLOEXEC));
    must(write(fd, text, strlen(text)));
    close(fd);
}

/* ---- the small mount namespace everything is forked from ---- */

static void mount_layer(const char *path, const char *where)
{
    struct stat st;
    must(stat(path, &st));
    if (S_ISDIR(st.st_mode)) {
        must(mount(path, where, NULL, MS_BIND, NULL));
        return;
    }
    /* mount(2) with a regular file as source: file-backed EROFS, no loop device. */
    must(mount(path, where, "erofs", MS_RDONLY, NULL));
}

/* Copying a mount namespace costs by its mounts, so the one that is copied for each sandbox holds only what is needed. */
void setup_start(struct setup *setup)
{
    char path[4096];
    umask(0);
    setup->v2_fd = (int)must(open(setup->v2, O_DIRECTORY | O_CLOEXEC));
    for (int i = 0; i < setup->v1_count; i++)
        setup->v1_fd[i] = (int)must(open(setup->v1[i], O_DIRECTORY | O_CLOEXEC));
    must(unshare(CLONE_NEWNS));
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
    snprintf(path, sizeof path, "%s/small", setup->work);
    mkdir(path, 0700);
    must(mount("tmpfs", path, "tmpfs", 0, "size=1m"));
    snprintf(path, sizeof path, "%s/uppers", setup->work);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/small", setup->work);
    int root = (int)must(open(path, O_DIRECTORY | O_CLOEXEC));
    for (const char *const *dir = (const char *const[]){"m", "proc", "uppers", NULL}; *dir; dir++)
        must(mkdirat(root, *dir, 0755));
    for (int i = 0; i < setup->layer_count; i++) {
        snprintf(path, sizeof path, "%s/small/l%d", setup->work, i);
        must(mkdir(path, 0755));
        mount_layer(setup->layers[i], path);
    }
    char from[4096];
    snprintf(from, sizeof from, "%s/uppers", setup->work);
    snprintf(path, sizeof path, "%s/small/uppers", setup->work);
    must(mount(from, path, NULL, MS_BIND, NULL));
    /* A fully visible /proc must be there, or the kernel refuses one in a user namespace. */
    must(fchdir(root));
    must(mount("proc", "proc", "proc", 0, NULL));
    must(syscall(SYS_pivot_root, ".", "."));
    must(umount2(".", MNT_DETACH));
    must(chdir("/"));
    setup->upper_fd = (int)must(open("/uppers", O_DIRECTORY | O_CLOEXEC));
    close(root);
}

void worker_start(struct worker *worker, unsigned seed)
{
    worker->random = seed;
    worker->runs = 0;
    worker->stack_enter = malloc(VFORK_STACK_BYTES);
    worker->stack_exec = malloc(VFORK_STACK_BYTES);
    /* Of this thread only: capabilities stay when the file system ids change to the sandbox's (see make_overlay). */
    must(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP));
}

/* ---- cgroups ---- */

static const char *const V2_TREE[] = {"s%d", "s%d/payload", "s%d/payload/init", "s%d/aux", NULL};

static int make_cgroups(struct setup *setup, int id)
{
    char path[64];
    for (const char *const *part = V2_TREE; *part; part++) {
        snprintf(path, sizeof path, *part, id);
        must(mkdirat(setup->v2_fd, path, 0755));
    }
    for (const struct limit *limit = V2_LIMITS; setup->v2_limits && limit->file; limit++) {
        snprintf(path, sizeof path, "s%d/%s", id, limit->file);
        write_at(setup->v2_fd, path, limit->value);
    }
    for (int i = 0; i < setup->v1_count; i++) {
        snprintf(path, sizeof path, "s%d", id);
        must(mkdirat(setup->v1_fd[i], path, 0755));
        snprintf(path, sizeof path, "s%d/%s", id, V1_LIMITS[i].file);
        write_at(setup->v1_fd[i], path, V1_LIMITS[i].value);
    }
    snprintf(path, sizeof path, "s%d/payload/init", id);
    return (int)must(openat(setup->v2_fd, path, O_PATH | O_DIRECTORY | O_CLOEXEC));
}

/* A cgroup may be busy for a moment after its last process was reaped. */
void remove_cgroup(int dir, const char *path)
{
    for (int tries = 0; unlinkat(dir, path, AT_REMOVEDIR) < 0; tries++) {
        if (errno != EBUSY || tries > 2000)
            must(unlinkat(dir, path, AT_REMOVEDIR));
        usleep(100);
    }
}

static void remove_cgroups(struct setup *setup, int id)
{
    char path[64];
    for (int i = 3; i >= 0; i--) {
        snprintf(path, sizeof path, V2_TREE[i], id);
        remove_cgroup(setup->v2_fd, path);
    }
    snprintf(path, sizeof path, "s%d", id);
    for (int i = 0; i < setup->v1_count; i++)
        remove_cgroup(setup->v1_fd[i], path);
}

/* ---- file systems, made detached in the initial user namespace ---- */

static void idmap(int mount_fd, int userns)
{
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    must(sys_mount_setattr(mount_fd, &attr));
}

static int make_tmpfs(const char *size, const char *mode)
{
    int fs = (int)must(sys_fsopen("tmpfs"));
    must(sys_fsconfig(fs, FSCONFIG_SET_STRING, "size", size, 0));
    must(sys_fsconfig(fs, FSCONFIG_SET_STRING, "mode", mode, 0));
    must(sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0));
    int fd = (int)must(sys_fsmount(fs, MOUNT_ATTR_NOSUID));
    close(fs);
    return fd;
}

static int make_upper(struct setup *setup, int id)
{
    char path[64];
    if (setup->upper_tmpfs) {
        int fd = make_tmpfs("1g", "755");
        must(mkdirat(fd, "u", 0755));
        must(mkdirat(fd, "w", 0755));
        return fd;
    }
    for (const char *const *part = (const char *const[]){"%d", "%d/u", "%d/w", NULL}; *part; part++) {
        snprintf(path, sizeof path, *part, id);
        must(mkdirat(setup->upper_fd, path, 0755));
    }
    snprintf(path, sizeof path, "/uppers/%d", id);
    return (int)must(sys_open_tree(AT_FDCWD, path, OPEN_TREE_CLONE));
}

static int make_overlay(struct setup *setup, int id, int userns)
{
    char path[16];
    int layers[LAYERS_MAX], fs = (int)must(sys_fsopen("overlay"));
    for (int i = setup->layer_count - 1; i >= 0; i--) {
        snprintf(path, sizeof path, "/l%d", i);
        layers[i] = (int)must(sys_open_tree(AT_FDCWD, path, OPEN_TREE_CLONE));
        idmap(layers[i], userns);
        must(sys_fsconfig(fs, FSCONFIG_SET_FD, "lowerdir+", NULL, layers[i]));
    }
    int tree = make_upper(setup, id);
    idmap(tree, userns);
    int upper = (int)must(openat(tree, "u", O_PATH | O_DIRECTORY | O_CLOEXEC));
    int work = (int)must(openat(tree, "w", O_PATH | O_DIRECTORY | O_CLOEXEC));
    must(sys_fsconfig(fs, FSCONFIG_SET_FD, "upperdir", NULL, upper));
    must(sys_fsconfig(fs, FSCONFIG_SET_FD, "workdir", NULL, work));
    must(sys_fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0));
    /* As the sandbox's root: with host ids, which the idmapped upper does not know, the overlay ends up read-only. */
    syscall(SYS_setfsuid, UID_BASE);
    syscall(SYS_setfsgid, UID_BASE);
    must(sys_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0));
    syscall(SYS_setfsuid, 0);
    syscall(SYS_setfsgid, 0);
    int fd = (int)must(sys_fsmount(fs, MOUNT_ATTR_NODEV));
    /* Not before: the last descriptor of a detached mount takes the mount with it, and the overlay clones it when made. */
    for (int i = 0; i < setup->layer_count; i++)
        close(layers[i]);
    close(upper), close(work), close(tree), close(fs);
    return fd;
}

static int make_dev(void)
{
    static const struct {
        const char *name;
        unsigned major, minor;
    } nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
    int fd = make_tmpfs("64k", "755");
    for (unsigned i = 0; i < sizeof nodes / sizeof *nodes; i++)
        must(mknodat(fd, nodes[i].name, S_IFCHR | 0666, (dev_t)(nodes[i].major << 8 | nodes[i].minor)));
    must(symlinkat("/proc/self/fd", fd, "fd"));
    must(mkdirat(fd, "shm", 01777));
    return fd;
}

static void make_network(void)
{
    must(unshare(CLONE_NEWNET));
    int fd = (int)must(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    must(ioctl(fd, SIOCSIFFLAGS, &lo));
    close(fd);
}

/* ---- create ---- */

struct mounts {
    int overlay, dev;
};

static _Noreturn void init_main(int channel)
{
    struct mounts mounts;
    must(read(channel, &mounts, sizeof mounts));
    must(syscall(SYS_setresgid, 0, 0, 0));
    must(syscall(SYS_setresuid, 0, 0, 0));
    must(sys_move_mount(mounts.overlay, AT_FDCWD, "/m"));
    must(sys_move_mount(mounts.dev, AT_FDCWD, "/m/dev"));
    must(mount("proc", "/m/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
    must(chdir("/m"));
    must(syscall(SYS_pivot_root, ".", "."));
    must(umount2(".", MNT_DETACH));
    must(sethostname("sandbox", 7));
    must(setsid());
    signal(SIGCHLD, SIG_IGN); /* the kernel reaps */
    must(write(channel, "", 1));
    must(sys_close_range(0, ~0u, CLOSE_RANGE_UNSHARE));
    for (;;)
        pause();
}

static void map_ids(pid_t pid, int *userns)
{
    char path[64], map[64];
    int length = snprintf(map, sizeof map, "0 %d %d\n", UID_BASE, UID_RANGE);
    for (const char *const *file = (const char *const[]){"uid_map", "gid_map", NULL}; *file; file++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, *file);
        int fd = (int)must(open(path, O_WRONLY | O_CLOEXEC));
        must(write(fd, map, (size_t)length));
        close(fd);
    }
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    *userns = (int)must(open(path, O_RDONLY | O_CLOEXEC));
}

void sandbox_create(struct setup *setup, struct sandbox *sandbox, int id)
{
    int channel[2], userns, cgroup = make_cgroups(setup, id);
    make_network();
    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel));
    /* CLONE_FILES: the child sees the mounts' descriptors that are made after it. It lets go of the table when done. */
    struct clone_args args = {.flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC |
                                       CLONE_NEWCGROUP | CLONE_PIDFD | CLONE_INTO_CGROUP | CLONE_FILES,
                              .pidfd = (uint64_t)(uintptr_t)&sandbox->pidfd,
                              .cgroup = (uint64_t)cgroup,
                              .exit_signal = SIGCHLD};
    pid_t pid = (pid_t)must(syscall(SYS_clone3, &args, sizeof args));
    if (pid == 0)
        init_main(channel[1]);
    char path[64], text[16];
    snprintf(text, sizeof text, "%d", pid);
    snprintf(path, sizeof path, "s%d/cgroup.procs", id);
    for (int i = 0; i < setup->v1_count; i++)
        write_at(setup->v1_fd[i], path, text);
    map_ids(pid, &userns);
    struct mounts mounts = {.overlay = make_overlay(setup, id, userns), .dev = make_dev()};
    must(write(channel[0], &mounts, sizeof mounts));
    struct pollfd done[2] = {{.fd = channel[0], .events = POLLIN}, {.fd = sandbox->pidfd, .events = POLLIN}};
    must(poll(done, 2, -1));
    must(done[1].revents ? -1 : 0); /* the init died: it has said why */
    close(mounts.overlay), close(mounts.dev), close(userns), close(cgroup), close(channel[0]), close(channel[1]);
    sandbox->id = id;
}

/* ---- stop ---- */

/* What overlayfs makes in its workdir, `w`. */
#define OVERLAY_OWN "%d/w/" "work"

/* Only what an overlay leaves behind: the program run here writes nothing. */
static void remove_upper(struct setup *setup, int id)
{
    static const char *const parts[] = {OVERLAY_OWN "/incompat/volatile", OVERLAY_OWN "/incompat", OVERLAY_OWN,
                                        "%d/w", "%d/u", "%d", NULL};
    char path[64];
    snprintf(path, sizeof path, OVERLAY_OWN "/incompat/volatile/dirty", id);
    must(unlinkat(setup->upper_fd, path, 0));
    for (const char *const *part = parts; *part; part++) {
        snprintf(path, sizeof path, *part, id);
        must(unlinkat(setup->upper_fd, path, AT_REMOVEDIR));
    }
}

void sandbox_stop(struct setup *setup, const struct sandbox *sandbox)
{
    char path[64];
    siginfo_t info = {0};
    snprintf(path, sizeof path, "s%d/cgroup.kill", sandbox->id);
    write_at(setup->v2_fd, path, "1");
    must(sys_waitid(P_PIDFD, sandbox->pidfd, &info, WEXITED));
    close(sandbox->pidfd);
    remove_cgroups(setup, sandbox->id);
    if (!setup->upper_tmpfs)
        remove_upper(setup, sandbox->id);
}
