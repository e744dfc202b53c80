/* PyTorch's watchdog over NCCL, which keeps the tensors of a collective until it has seen its end.
 *
 * It looks ten times a second, at an event that PyTorch records after each collective, and hands the tensors back to
 * the thread that calls the next collective. On a card a step takes longer than that. Here it may be over first, and
 * then DistributedDataParallel's first buckets, which are made anew after the first step, would stay beside the new
 * ones or not, as it happens. So a broadcast, with which the new buckets begin, waits until the watchdog has seen the
 * end of what went before: the peak is that of a card whose steps are longer than the watchdog's sleep. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "nccl.h"
#include "vgpu.h"

enum { MOST = 1024, LOOKS = 500, SETTLED = 10 }; /* looks are 2 ms apart */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *ends[MOST]; /* events after collectives, whose end nobody has seen yet */
static size_t count;
static _Atomic int absent; /* nobody watches */
static __thread bool called; /* a collective, after which no event was recorded yet */

void watchdog_collective_called(void) { called = !absent; }

void watchdog_event_recorded(const void *event) {
    if (!called) return;
    called = false;
    pthread_mutex_lock(&lock);
    if (count < MOST) ends[count++] = event;
    pthread_mutex_unlock(&lock);
}

static void seen(const void *event) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if (ends[i] == event) ends[i--] = ends[--count];
    pthread_mutex_unlock(&lock);
}

static size_t left(void) {
    pthread_mutex_lock(&lock);
    size_t number = count;
    pthread_mutex_unlock(&lock);
    return number;
}

void watchdog_wait(void) {
    struct timespec moment = {0, 2000000};
    if (absent || left() == 0) return;
    for (int look = 0; look < LOOKS && left() > 0; look++) nanosleep(&moment, NULL);
    absent = left() > 0;
    for (int look = 0; look < SETTLED && !absent; look++) nanosleep(&moment, NULL); /* it hands the last one back */
}

API int cudaEventQuery(const void *event) {
    seen(event);
    return SUCCESS;
}

API int cudaEventDestroy(const void *event) {
    seen(event);
    return SUCCESS;
}
