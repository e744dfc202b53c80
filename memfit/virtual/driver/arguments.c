/* What a kernel may have written to, as far as its arguments tell.
 *
 * A launch passes addresses of arguments that lie on the stack of the function that launches, above the list of these
 * addresses. How many there are and how large each is only the compiler knows; so that part of the stack is looked
 * through for device addresses, as a conservative garbage collector does. One that only happens to lie there makes
 * forget a value that is still there, which is then unknown. */
#define _GNU_SOURCE
#include <pthread.h>

#include "vgpu.h"

enum { MOST = 128 };

/* Where the calling thread's stack ends. */
static uintptr_t stack_end(void) {
    static __thread uintptr_t end;
    pthread_attr_t attributes;
    void *low;
    size_t bytes;
    if (end != 0 || pthread_getattr_np(pthread_self(), &attributes) != 0) return end;
    if (pthread_attr_getstack(&attributes, &low, &bytes) == 0) end = (uintptr_t)low + bytes;
    pthread_attr_destroy(&attributes);
    return end;
}

__attribute__((no_sanitize("address"))) void arguments_touched(const void *arguments, size_t words) {
    uintptr_t found[MOST], at = (uintptr_t)arguments, end = stack_end();
    size_t count = 0;
    if (at % sizeof at != 0 || at >= end || end - at > ((size_t)1 << 30)) return; /* not on this stack */
    if (end - at > words * sizeof at) end = at + words * sizeof at;
    for (const uintptr_t *word = (const uintptr_t *)at; word < (const uintptr_t *)end && count < MOST; word++)
        if (*word % 4 == 0 && memory_may_hold(*word)) found[count++] = *word;
    if (count > 0) values_touch(found, count);
}

void arguments_listed(void *const *addresses, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uintptr_t address = (uintptr_t)addresses[i];
        if (memory_may_hold(address)) values_touch(&address, 1);
    }
    values_kernel_ran(false);
}
