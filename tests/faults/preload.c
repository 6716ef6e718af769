/* What a program does to the files below one folder, and what happens to it there.
 *
 * Loaded with LD_PRELOAD. Environment:
 *   COEVOLVE_TRACE_ROOT  the folder; calls on other paths pass untouched
 *   COEVOLVE_TRACE       file that receives one record per call that changes something or makes it durable
 *   COEVOLVE_FAULT       "N:ERRNO" or "N:ERRNO:on": the N-th such call (from 1) fails with that errno, with `on`
 *                        every later one, too (a full disk)
 *
 * A record, little-endian: u8 kind, u8 failed, u16 length of path, u16 length of second path, u64 offset,
 * u32 length of data; then path, second path, data. Kinds: C create, T truncate to offset, W write, F flush a
 * file, D flush a folder, R rename, U unlink, M make folder, X remove folder, L hard link.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_len;
static int trace = -1;
static long fault_at, fault_errno, fault_stays, calls;
static __thread int inside;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
    const char *r = getenv("COEVOLVE_TRACE_ROOT"), *t = getenv("COEVOLVE_TRACE"), *f = getenv("COEVOLVE_FAULT");
    if (!r || !realpath(r, root)) return;
    root_len = strlen(root);
    if (t) trace = REAL(open)(t, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (f) {
        char *end;
        fault_at = strtol(f, &end, 10);
        fault_errno = *end == ':' ? strtol(end + 1, &end, 10) : EIO;
        fault_stays = *end == ':';
    }
}

/* Absolute form of a path; 0 when it is not below the root. The last part need not exist. */
static int below(int dir, const char *path, char *out) {
    if (!root_len || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char link[64], base[PATH_MAX];
        if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return !strncmp(out, root, root_len) && (out[root_len] == '/' || !out[root_len]);
}

static int of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (!root_len) return 0;
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return !strncmp(out, root, root_len) && (out[root_len] == '/' || !out[root_len]);
}

static void put(char kind, int failed, const char *path, const char *second, uint64_t offset, const void *data, uint32_t len) {
    if (trace < 0) return;
    unsigned char head[18];
    const char *p = strlen(path) > root_len ? path + root_len + 1 : "";
    const char *s = second && strlen(second) > root_len ? second + root_len + 1 : "";
    uint16_t pl = strlen(p), sl = strlen(s);
    head[0] = kind;
    head[1] = failed;
    memcpy(head + 2, &pl, 2);
    memcpy(head + 4, &sl, 2);
    memcpy(head + 6, &offset, 8);
    memcpy(head + 14, &len, 4);
    struct iovec parts[] = {{head, sizeof head}, {(void *)p, pl}, {(void *)s, sl}, {(void *)data, len}};
    if (REAL(writev)(trace, parts, 4) < 0) abort();
}

/* Counts a call; whether it has to fail. The lock is held. The tests' own notes (`ack`) never fail. */
static int fails(const char *path) {
    if (!strcmp(path + root_len, "/ack")) return 0;
    calls++;
    return fault_at && (calls == fault_at || (fault_stays && calls > fault_at));
}

/* One call: real is run under the lock, so that the order of the records is the order of the effects. */
#define CALL(type, known, kind, path, second, offset, data, len, real)                 \
    do {                                                                               \
        if (inside || !(known)) return real;                                           \
        inside = 1;                                                                    \
        pthread_mutex_lock(&lock);                                                     \
        type result = -1;                                                              \
        int error = fault_errno;                                                       \
        if (!fails(path)) {                                                              \
            result = real;                                                             \
            error = errno;                                                             \
        }                                                                              \
        put(kind, result < 0, path, second, offset, data, result < 0 ? 0 : (len));     \
        pthread_mutex_unlock(&lock);                                                   \
        inside = 0;                                                                    \
        errno = error;                                                                 \
        return result;                                                                 \
    } while (0)

static int opened(int dir, const char *path, int flags, mode_t mode, int (*real)(int, const char *, int, ...)) {
    char p[PATH_MAX];
    if (inside || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !below(dir, path, p))
        return real(dir, path, flags, mode);
    inside = 1;
    pthread_mutex_lock(&lock);
    struct stat s;
    int is_new = stat(p, &s) != 0;
    int cuts = (flags & O_TRUNC) && !is_new && s.st_size > 0;
    int result = -1, error = fault_errno;
    if (!(is_new || cuts) || !fails(p)) {
        result = real(dir, path, flags, mode);
        error = errno;
    }
    if (is_new) put('C', result < 0, p, NULL, 0, NULL, 0);
    if (cuts) put('T', result < 0, p, NULL, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    inside = 0;
    errno = error;
    return result;
}

#define MODE                                        \
    mode_t mode = 0;                                \
    if (flags & (O_CREAT | O_TMPFILE)) {            \
        va_list args;                               \
        va_start(args, flags);                      \
        mode = va_arg(args, mode_t);                \
        va_end(args);                               \
    }

int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, REAL(openat)); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, REAL(openat64)); }
int openat(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags, mode, REAL(openat)); }
int openat64(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags, mode, REAL(openat64)); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, REAL(openat)); }

static uint64_t position(int fd) {
    struct stat s;
    if ((fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &s)) return s.st_size;
    off_t at = lseek(fd, 0, SEEK_CUR);
    return at < 0 ? 0 : at;
}

ssize_t write(int fd, const void *data, size_t len) {
    char p[PATH_MAX];
    int known = !inside && of_fd(fd, p);
    uint64_t at = known ? position(fd) : 0;
    CALL(ssize_t, known, 'W', p, NULL, at, data, result, REAL(write)(fd, data, len));
}
ssize_t pwrite(int fd, const void *data, size_t len, off_t at) {
    char p[PATH_MAX];
    CALL(ssize_t, !inside && of_fd(fd, p), 'W', p, NULL, at, data, result, REAL(pwrite)(fd, data, len, at));
}
ssize_t pwrite64(int fd, const void *data, size_t len, off64_t at) {
    char p[PATH_MAX];
    CALL(ssize_t, !inside && of_fd(fd, p), 'W', p, NULL, at, data, result, REAL(pwrite64)(fd, data, len, at));
}
/* Vectors go piece by piece: the callers here loop over short writes. */
ssize_t writev(int fd, const struct iovec *v, int n) {
    char p[PATH_MAX];
    if (inside || !of_fd(fd, p)) return REAL(writev)(fd, v, n);
    for (int i = 0; i < n; i++)
        if (v[i].iov_len) return write(fd, v[i].iov_base, v[i].iov_len);
    return 0;
}
int fsync(int fd) {
    char p[PATH_MAX];
    struct stat s;
    int known = !inside && of_fd(fd, p), folder = known && !fstat(fd, &s) && S_ISDIR(s.st_mode);
    CALL(int, known, folder ? 'D' : 'F', p, NULL, 0, NULL, 0, REAL(fsync)(fd));
}
int fdatasync(int fd) {
    char p[PATH_MAX];
    CALL(int, !inside && of_fd(fd, p), 'F', p, NULL, 0, NULL, 0, REAL(fdatasync)(fd));
}
int ftruncate(int fd, off_t len) {
    char p[PATH_MAX];
    CALL(int, !inside && of_fd(fd, p), 'T', p, NULL, len, NULL, 0, REAL(ftruncate)(fd, len));
}
int ftruncate64(int fd, off64_t len) {
    char p[PATH_MAX];
    CALL(int, !inside && of_fd(fd, p), 'T', p, NULL, len, NULL, 0, REAL(ftruncate64)(fd, len));
}
int rename(const char *from, const char *to) {
    char a[PATH_MAX], b[PATH_MAX];
    int known = !inside && below(AT_FDCWD, from, a) && below(AT_FDCWD, to, b);
    CALL(int, known, 'R', a, b, 0, NULL, 0, REAL(rename)(from, to));
}
int link(const char *from, const char *to) {
    char a[PATH_MAX], b[PATH_MAX];
    int known = !inside && below(AT_FDCWD, from, a) && below(AT_FDCWD, to, b);
    CALL(int, known, 'L', a, b, 0, NULL, 0, REAL(link)(from, to));
}
int linkat(int da, const char *from, int db, const char *to, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int known = !inside && below(da, from, a) && below(db, to, b);
    CALL(int, known, 'L', a, b, 0, NULL, 0, REAL(linkat)(da, from, db, to, flags));
}
int unlink(const char *path) {
    char p[PATH_MAX];
    CALL(int, !inside && below(AT_FDCWD, path, p), 'U', p, NULL, 0, NULL, 0, REAL(unlink)(path));
}
int unlinkat(int dir, const char *path, int flags) {
    char p[PATH_MAX];
    char kind = flags & AT_REMOVEDIR ? 'X' : 'U';
    CALL(int, !inside && below(dir, path, p), kind, p, NULL, 0, NULL, 0, REAL(unlinkat)(dir, path, flags));
}
int rmdir(const char *path) {
    char p[PATH_MAX];
    CALL(int, !inside && below(AT_FDCWD, path, p), 'X', p, NULL, 0, NULL, 0, REAL(rmdir)(path));
}
int mkdir(const char *path, mode_t mode) {
    char p[PATH_MAX];
    CALL(int, !inside && below(AT_FDCWD, path, p), 'M', p, NULL, 0, NULL, 0, REAL(mkdir)(path, mode));
}
