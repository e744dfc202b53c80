/* What memfit's own worker asks of this library. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "vgpu.h"

enum { MOST_NAMES = 512 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *names[MOST_NAMES];
static size_t name_count, call_count;

void note_unknown(const char *name, int *seen) {
    pthread_mutex_lock(&lock);
    call_count++;
    if (!*seen && name_count < MOST_NAMES) names[name_count++] = name;
    *seen = 1;
    pthread_mutex_unlock(&lock);
}

/* Sets the memory of every device; 0 when done, and refused once anything was allocated. */
API int memfit_vgpu_set_total(size_t bytes) {
    const Card *c = card();
    if (c->devices == 0) return NO_DEVICE;
    if (bytes <= c->context || bytes > TIB || !memory_untouched()) return INVALID_VALUE;
    card_set_total(bytes);
    return SUCCESS;
}

/* Whether the card was looked at in this process; its description counts from then on. */
API int memfit_vgpu_card_was_read(void) { return card_was_read(); }

/* Bytes in use on a device, contexts and other processes of the same machine included, now and at most. */
API size_t memfit_vgpu_used(int device) { return memory_used(device); }
API size_t memfit_vgpu_used_peak(int device) { return memory_used_peak(device); }
/* The most that this process held beside its context. */
API size_t memfit_vgpu_held_peak(int device) { return memory_held_peak(device); }
/* How much of that was rounding up to whole pages, which a card's own memory pools do not do for each block. */
API size_t memfit_vgpu_rounding(int device) { return memory_rounding(device); }

/* Calls whose results were invented, and the names of the functions, one to a line. */
API size_t memfit_vgpu_unknown_calls(void) {
    pthread_mutex_lock(&lock);
    size_t calls = call_count;
    pthread_mutex_unlock(&lock);
    return calls;
}

API size_t memfit_vgpu_unknown_names(char *text, size_t size) {
    size_t length = 0;
    if (size == 0) return 0;
    text[0] = '\0';
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < name_count && length + strlen(names[i]) + 2 < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%s\n", names[i]);
    pthread_mutex_unlock(&lock);
    return length;
}
