/* Streams, events and graph capture.
 *
 * All work is done when it is asked for, so streams and events are only names. Capture is a small state machine:
 * a stream captures from begin to end, and a stream that waits for an event of a capturing stream joins it. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "nccl.h"
#include "vgpu.h"

enum { MOST_MEMBERS = 64, MOST_MARKS = 1024 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

typedef struct {
    const void *name;          /* a stream or an event */
    unsigned long long capture; /* the capture that it belongs to; 0 for none */
} Membership;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Membership streams[MOST_MEMBERS], events[MOST_MARKS];
static unsigned long long captures; /* how many were begun: their numbers count up from 1 */
static _Atomic int active;          /* captures in progress, so that the common case takes no lock */
static void *graphs[MOST_MEMBERS];  /* by the index of the stream that began the capture */
static size_t next_mark;

void *token(void) {
    static _Atomic uintptr_t last;
    return (void *)(((uintptr_t)0x6d656d0 << 20) + atomic_fetch_add(&last, 1) * 64);
}

static Membership *member(Membership *list, size_t size, const void *name) {
    for (size_t i = 0; i < size; i++)
        if (list[i].capture != 0 && list[i].name == name) return &list[i];
    return NULL;
}

static int begin(const void *stream, void *graph) {
    int status = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (member(streams, MOST_MEMBERS, stream) == NULL) {
        for (size_t i = 0; i < MOST_MEMBERS; i++) {
            if (streams[i].capture != 0) continue;
            streams[i] = (Membership){stream, ++captures};
            graphs[i] = graph;
            atomic_fetch_add(&active, 1);
            status = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return status ? fail(status) : SUCCESS;
}

API int cudaStreamBeginCapture(void *stream, UNUSED int mode) { return begin(stream, token()); }

API int cudaStreamBeginCaptureToGraph(void *stream, void *graph, UNUSED const void *nodes, UNUSED const void *edges,
                                      UNUSED size_t count, UNUSED int mode) {
    return begin(stream, graph);
}

static void forget(Membership *list, size_t size, unsigned long long capture) {
    for (size_t i = 0; i < size; i++)
        if (list[i].capture == capture) list[i].capture = 0;
}

API int cudaStreamEndCapture(void *stream, void **graph) {
    pthread_mutex_lock(&lock);
    Membership *found = member(streams, MOST_MEMBERS, stream);
    *graph = found ? graphs[found - streams] : NULL;
    if (found != NULL) {
        unsigned long long capture = found->capture;
        forget(streams, MOST_MEMBERS, capture);
        forget(events, MOST_MARKS, capture);
        atomic_fetch_sub(&active, 1);
    }
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : fail(CAPTURE_INVALID);
}

static int capture_of(const void *stream, unsigned long long *id, void **graph) {
    unsigned long long capture = 0;
    if (graph != NULL) *graph = NULL;
    if (atomic_load(&active) > 0) {
        pthread_mutex_lock(&lock);
        const Membership *found = member(streams, MOST_MEMBERS, stream);
        if (found != NULL) {
            capture = found->capture;
            for (size_t i = 0; graph != NULL && i < MOST_MEMBERS; i++)
                if (streams[i].capture == capture && graphs[i] != NULL) *graph = graphs[i];
        }
        pthread_mutex_unlock(&lock);
    }
    if (id != NULL) *id = capture;
    return capture != 0 ? CAPTURE_ACTIVE : CAPTURE_NONE;
}

API int cudaStreamIsCapturing(void *stream, int *status) {
    *status = capture_of(stream, NULL, NULL);
    return SUCCESS;
}

#if VGPU_CUDA_MAJOR >= 13
API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,
                                 const void **edges, size_t *count) {
    *status = capture_of(stream, id, graph);
    if (nodes != NULL) *nodes = NULL;
    if (edges != NULL) *edges = NULL;
    if (count != NULL) *count = 0;
    return SUCCESS;
}
#else
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph,
                                    const void **nodes, size_t *count) {
    *status = capture_of(stream, id, graph);
    if (nodes != NULL) *nodes = NULL;
    if (count != NULL) *count = 0;
    return SUCCESS;
}
#endif

API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current;
    int before = current;
    current = *mode;
    *mode = before;
    return SUCCESS;
}

/* An event recorded while its stream captures carries the capture to the streams that wait for it. */
API int cudaEventRecord(void *event, void *stream) {
    watchdog_event_recorded(event);
    if (atomic_load(&active) == 0) return SUCCESS;
    pthread_mutex_lock(&lock);
    const Membership *found = member(streams, MOST_MEMBERS, stream);
    Membership *mark = member(events, MOST_MARKS, event);
    if (mark == NULL && found != NULL) mark = &events[next_mark++ % MOST_MARKS];
    if (mark != NULL) *mark = (Membership){event, found ? found->capture : 0};
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int cudaEventRecordWithFlags(void *event, void *stream, UNUSED unsigned flags) {
    return cudaEventRecord(event, stream);
}

API int cudaStreamWaitEvent(void *stream, void *event, UNUSED unsigned flags) {
    if (atomic_load(&active) == 0) return SUCCESS;
    pthread_mutex_lock(&lock);
    const Membership *mark = member(events, MOST_MARKS, event);
    if (mark != NULL && member(streams, MOST_MEMBERS, stream) == NULL) {
        for (size_t i = 0; i < MOST_MEMBERS; i++) {
            if (streams[i].capture != 0) continue;
            streams[i] = (Membership){stream, mark->capture};
            graphs[i] = NULL;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API int cudaGraphCreate(void **graph, UNUSED unsigned flags) {
    *graph = token();
    return SUCCESS;
}

API int cudaGraphInstantiate(void **executable, UNUSED void *graph, UNUSED unsigned long long flags) {
    *executable = token();
    return SUCCESS;
}

API int cudaGraphInstantiateWithFlags(void **executable, UNUSED void *graph, UNUSED unsigned long long flags) {
    *executable = token();
    return SUCCESS;
}

/* One node, so that nobody takes the graph for empty. */
API int cudaGraphGetNodes(UNUSED void *graph, void **nodes, size_t *count) {
    if (nodes != NULL && *count > 0) nodes[0] = token();
    *count = 1;
    return SUCCESS;
}

API int cudaStreamCreate(void **stream) {
    *stream = token();
    return SUCCESS;
}

API int cudaStreamCreateWithFlags(void **stream, UNUSED unsigned flags) { return cudaStreamCreate(stream); }

API int cudaStreamCreateWithPriority(void **stream, UNUSED unsigned flags, UNUSED int priority) {
    return cudaStreamCreate(stream);
}

API int cuStreamCreate(void **stream, UNUSED unsigned flags) { return cudaStreamCreate(stream); }

API int cuStreamCreateWithPriority(void **stream, UNUSED unsigned flags, UNUSED int priority) {
    return cudaStreamCreate(stream);
}

API int cudaStreamGetPriority(UNUSED void *stream, int *priority) {
    *priority = 0;
    return SUCCESS;
}

API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    return SUCCESS;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return cudaDeviceGetStreamPriorityRange(least, greatest);
}

API int cudaEventCreate(void **event) {
    *event = token();
    return SUCCESS;
}

API int cudaEventCreateWithFlags(void **event, UNUSED unsigned flags) { return cudaEventCreate(event); }

API int cuEventCreate(void **event, UNUSED unsigned flags) { return cudaEventCreate(event); }

/* Long enough that autotuners, which aim at a total time, need few repetitions. */
API int cudaEventElapsedTime(float *milliseconds, UNUSED void *start, UNUSED void *end) {
    *milliseconds = 20.0F;
    return SUCCESS;
}

API int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    return cudaEventElapsedTime(milliseconds, start, end);
}

/* Host functions queued on a stream run at once. */
API int cudaLaunchHostFunc(UNUSED void *stream, void (*function)(void *), void *data) {
    function(data);
    return SUCCESS;
}

API int cudaStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data,
                              UNUSED unsigned flags) {
    callback(stream, SUCCESS, data);
    return SUCCESS;
}
