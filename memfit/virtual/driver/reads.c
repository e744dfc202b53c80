/* What host code reads from device memory, and what it is answered.
 *
 * A read is of one of three kinds: of bytes that certainly are what was written; of bytes that were written, but
 * kernels have run since and may have changed them; of bytes that nobody wrote, because a kernel computes them. The
 * last two may steer a program. So a program can be run twice:
 *
 *   - once recording: memfit's own worker works out values beside the program and gives the answers of single reads
 *     in advance; every read's answer is kept on a tape, in order;
 *   - once playing: every read is answered from the tape. One of another size than the tape holds, or beyond its
 *     end, is counted and answered as if there were no tape.
 *
 * A listener may be told of every read while it happens, on the thread that reads. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

/* Kinds of reads that a listener is told; the first three are those of values_certainty. */
enum { ANSWERED = 3 };
typedef void (*Listener)(size_t bytes, int kind);

enum { IDLE, RECORDING, PLAYING };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Listener listener;
static int state = IDLE;
static char *tape; /* entries: bytes of the read, whether they follow, and the bytes themselves */
static size_t tape_used, tape_capacity, position;
static size_t unknown, mismatched;

/* What this thread's next reads are answered: a stream of bytes, or counts that take the size that is read. */
enum { MOST_ANSWERS = 64 };
typedef struct {
    const char *bytes; /* NULL for a count; the caller keeps them */
    size_t left;
    int64_t count;
} Answer;
static __thread Answer answers[MOST_ANSWERS];
static __thread size_t answer_count, answer_next;

typedef struct {
    uint64_t bytes;
    uint8_t held;
} __attribute__((packed)) Entry;

static bool given(void *to, size_t bytes) {
    if (answer_next == answer_count) return false;
    Answer *answer = &answers[answer_next];
    if (answer->bytes == NULL) {
        if (bytes > sizeof answer->count) return false;
        memcpy(to, &answer->count, bytes); /* the low bytes come first */
        answer_next++;
        return true;
    }
    if (bytes > answer->left) return false;
    memcpy(to, answer->bytes, bytes);
    answer->bytes += bytes;
    answer->left -= bytes;
    if (answer->left == 0) answer_next++;
    return true;
}

static void record(const void *to, size_t bytes, bool held) {
    Entry entry = {bytes, held};
    size_t more = sizeof entry + (held ? bytes : 0);
    if (tape_used + more > tape_capacity) {
        size_t larger = 2 * (tape_used + more);
        char *moved = realloc(tape, larger);
        if (moved == NULL) return; /* playing will find the tape short, and count it */
        tape = moved;
        tape_capacity = larger;
    }
    memcpy(tape + tape_used, &entry, sizeof entry);
    if (held) memcpy(tape + tape_used + sizeof entry, to, bytes);
    tape_used += more;
}

static bool play(void *to, size_t bytes) {
    Entry entry;
    if (position + sizeof entry > tape_used) return false;
    memcpy(&entry, tape + position, sizeof entry);
    size_t whole = sizeof entry + (entry.held ? entry.bytes : 0);
    if (entry.bytes != bytes || whole > tape_used - position) return false;
    if (entry.held) memcpy(to, tape + position + sizeof entry, bytes);
    else memset(to, 0, bytes);
    position += whole;
    return true;
}

void reads_answer(void *to, const void *from, size_t bytes) {
    int kind = bytes <= SMALL ? values_certainty(from, bytes) : VALUE_UNKNOWN;
    if (kind != VALUE_UNKNOWN) memmove(to, from, bytes);
    else if (bytes == 1) *(bool *)to = values_affirmed();
    else {
        size_t known = bytes <= SMALL ? values_prefix(from, bytes) : 0;
        memmove(to, from, known);
        memset((char *)to + known, 0, bytes - known);
    }
    bool answered = given(to, bytes);
    pthread_mutex_lock(&lock);
    Listener told = listener;
    if (state == PLAYING) {
        answered = play(to, bytes);
        if (!answered) mismatched++;
    }
    if (state == RECORDING) record(to, bytes, answered || bytes <= SMALL);
    if (!answered && kind == VALUE_UNKNOWN) unknown++;
    pthread_mutex_unlock(&lock);
    if (told != NULL) told(bytes, answered ? ANSWERED : kind);
}

/* Names who is told of reads, or nobody. */
API void memfit_vgpu_listen(Listener who) {
    pthread_mutex_lock(&lock);
    listener = who;
    pthread_mutex_unlock(&lock);
}

/* Reads whose bytes a kernel would have computed, or that the tape did not hold. */
static size_t look(const size_t *counter) {
    pthread_mutex_lock(&lock);
    size_t value = *counter;
    pthread_mutex_unlock(&lock);
    return value;
}

API size_t memfit_vgpu_unknown_reads(void) { return look(&unknown); }
API size_t memfit_vgpu_mismatched_reads(void) { return look(&mismatched); }

/* Gives this thread's next reads their answers, in order; 0 when there is room for one more. */
API int memfit_vgpu_answer_bytes(const void *bytes, size_t size) {
    if (answer_count == MOST_ANSWERS) return INVALID_VALUE;
    answers[answer_count++] = (Answer){bytes, size, 0};
    return SUCCESS;
}

API int memfit_vgpu_answer_count(int64_t count) {
    if (answer_count == MOST_ANSWERS) return INVALID_VALUE;
    answers[answer_count++] = (Answer){NULL, 0, count};
    return SUCCESS;
}

/* Drops the answers that were not asked for, and returns how many there were. */
API size_t memfit_vgpu_drop_answers(void) {
    size_t left = answer_count - answer_next;
    answer_count = answer_next = 0;
    return left;
}

/* Writes values into device memory without a copy, or makes them unknown; small ones only. */
API void memfit_vgpu_poke(void *to, const void *from, size_t bytes) {
    if (bytes == 0 || bytes > SMALL || memory_device(to, bytes) < 0) return;
    if (from == NULL) {
        values_forget(to, bytes);
        return;
    }
    memcpy(to, from, bytes);
    values_write(to, bytes);
}

/* Copies a small value out of device memory without that being a read; 0 when it is known. */
API int memfit_vgpu_peek(void *to, const void *from, size_t bytes) {
    if (bytes == 0 || bytes > SMALL || memory_device(from, bytes) < 0 || !values_known(from, bytes)) return NOT_FOUND;
    memcpy(to, from, bytes);
    return SUCCESS;
}

API void memfit_vgpu_record(void) {
    pthread_mutex_lock(&lock);
    state = RECORDING;
    tape_used = position = 0;
    pthread_mutex_unlock(&lock);
}

/* Copies the tape where there is room for it, and returns its size. */
API size_t memfit_vgpu_tape(char *out, size_t size) {
    pthread_mutex_lock(&lock);
    if (size >= tape_used && tape_used > 0) memcpy(out, tape, tape_used);
    size_t used = tape_used;
    pthread_mutex_unlock(&lock);
    return used;
}

/* Answers from a tape from now on; 0 when it was taken over. */
API int memfit_vgpu_play(const char *data, size_t size) {
    char *copy = malloc(size ? size : 1);
    if (copy == NULL) return OUT_OF_MEMORY;
    if (size > 0) memcpy(copy, data, size);
    pthread_mutex_lock(&lock);
    free(tape);
    tape = copy;
    tape_used = tape_capacity = size;
    position = 0;
    state = PLAYING;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* Where the tape is, and moving it to where it was. */
API size_t memfit_vgpu_tape_position(void) {
    pthread_mutex_lock(&lock);
    size_t at = state == RECORDING ? tape_used : position;
    pthread_mutex_unlock(&lock);
    return at;
}

API void memfit_vgpu_tape_seek(size_t to) {
    pthread_mutex_lock(&lock);
    if (state == PLAYING && to <= tape_used) position = to;
    pthread_mutex_unlock(&lock);
}
