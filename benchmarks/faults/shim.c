/* Loaded into a checkpoint agent: acts just before its n-th call that changes the folder ROOT.
 *
 * FAULT_CONTROL names a file of four int64: the call to act at (-1: never), the calls so far, what to do
 * (1 kill this process, 2 kill the trainers' process group and this process, 3 stop this process, 4 EIO,
 * 5 ENOSPC), and the trainers' process group. It is written while this runs; after acting it is disarmed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static volatile int64_t *control;
static const char *root;
static size_t length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_CONTROL");
    root = getenv("FAULT_ROOT");
    if (!path || !root) return;
    length = strlen(root);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *map = mmap(NULL, 32, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map != MAP_FAILED) control = map;
}

static int inside(const char *path) { return path && !strncmp(path, root, length); }

static int inside_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return inside(path);
}

/* 0, or the errno to fail with. */
static int strike(int watched) {
    if (!control || !watched) return 0;
    int64_t number = __sync_fetch_and_add(&control[1], 1);
    if (control[0] < 0 || number != control[0]) return 0;
    control[0] = -1;
    switch (control[2]) {
    case 2: kill(-(pid_t)control[3], SIGKILL); /* fall through */
    case 1: kill(getpid(), SIGKILL); pause(); return 0;
    case 3: kill(getpid(), SIGSTOP); return 0;
    case 4: return EIO;
    case 5: return ENOSPC;
    }
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WATCH(watched) do { int failed = strike(control && (watched)); if (failed) { errno = failed; return -1; } } while (0)

ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { WATCH(inside_fd(fd)); return REAL(pwrite)(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { WATCH(inside_fd(fd)); return REAL(pwrite64)(fd, data, n, at); }
ssize_t write(int fd, const void *data, size_t n) { WATCH(inside_fd(fd)); return REAL(write)(fd, data, n); }
int fsync(int fd) { WATCH(inside_fd(fd)); return REAL(fsync)(fd); }
int ftruncate(int fd, off_t n) { WATCH(inside_fd(fd)); return REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { WATCH(inside_fd(fd)); return REAL(ftruncate64)(fd, n); }
int fallocate(int fd, int mode, off_t at, off_t n) { WATCH(inside_fd(fd)); return REAL(fallocate)(fd, mode, at, n); }
int rename(const char *a, const char *b) { WATCH(inside(b)); return REAL(rename)(a, b); }
int link(const char *a, const char *b) { WATCH(inside(b)); return REAL(link)(a, b); }
int linkat(int fa, const char *a, int fb, const char *b, int flags) { WATCH(inside(b)); return REAL(linkat)(fa, a, fb, b, flags); }
int unlink(const char *a) { WATCH(inside(a)); return REAL(unlink)(a); }
int mkdir(const char *a, mode_t mode) { WATCH(inside(a)); return REAL(mkdir)(a, mode); }
int rmdir(const char *a) { WATCH(inside(a)); return REAL(rmdir)(a); }

static int opening(const char *name, const char *path, int flags, mode_t mode) {
    if (flags & O_CREAT) WATCH(inside(path));
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    return real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
    return opening("open", path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
    return opening("open64", path, flags, mode);
}
