/* Shifts what a process is told of the date by the seconds that the file $JUMPING_CLOCK holds; other clocks go on.
 *
 * cc -shared -fPIC -o jumping_clock.so jumping_clock.c -ldl, and LD_PRELOAD=jumping_clock.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset_s(void) {
    static int file = -1;
    char text[32] = {0};
    if (file < 0) { const char *path = getenv("JUMPING_CLOCK"); file = path ? open(path, O_RDONLY | O_CLOEXEC) : -2; }
    if (file < 0 || pread(file, text, sizeof text - 1, 0) <= 0) return 0;
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (status == 0 && id == CLOCK_REALTIME) now->tv_sec += offset_s();
    return status;
}
time_t time(time_t *told) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t; clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec; now->tv_usec = t.tv_nsec / 1000; return 0;
}
