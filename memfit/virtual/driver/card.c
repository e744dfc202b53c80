/* The card's description: read once from MEMFIT_VGPU_CARD, and checked to the last figure.
 *
 * The variable reads `key=value;key=value;...`. A description that does not add up leaves a process without a
 * device and with one line on stderr: a wrong size would be worse than none. */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

#define VARIABLE "MEMFIT_VGPU_CARD"

static Card the_card;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool was_read;

/* Facts that follow from the compute capability: residency limits, and memory figures typical of it. */
static const struct {
    int capability, threads_sm, blocks_sm, bus_bits, memory_khz, core_khz;
} architectures[] = {
    {70, 2048, 32, 4096, 877000, 1530000},    {75, 1024, 16, 256, 5001000, 1590000},
    {80, 2048, 32, 5120, 1215000, 1410000},   {86, 1536, 16, 384, 9751000, 1695000},
    {87, 1536, 16, 256, 3200000, 1300000},    {89, 1536, 24, 384, 10501000, 2520000},
    {90, 2048, 32, 5120, 2619000, 1980000},   {100, 2048, 32, 8192, 3996000, 1965000},
    {103, 2048, 32, 8192, 3996000, 1920000},  {120, 1536, 24, 512, 14001000, 2407000},
};

__attribute__((format(printf, 1, 2))) static bool refuse(const char *why, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, why);
    vsnprintf(text, sizeof text, why, arguments);
    va_end(arguments);
    fprintf(stderr, "memfit: the virtual GPU refuses %s: %s; no device is reported\n", VARIABLE, text);
    return false;
}

/* Finds `key=value` in the description and copies the value. */
static bool find(const char *description, const char *key, char *value, size_t size) {
    size_t length = strlen(key);
    for (const char *at = description; at != NULL; at = strchr(at, ';')) {
        if (*at == ';') at++;
        if (strncmp(at, key, length) == 0 && at[length] == '=') {
            const char *start = at + length + 1;
            size_t count = strcspn(start, ";");
            if (count == 0 || count >= size) return refuse("the value of %s is empty or too long", key);
            memcpy(value, start, count);
            value[count] = '\0';
            return true;
        }
    }
    return refuse("%s is missing", key);
}

static bool find_number(const char *description, const char *key, size_t low, size_t high, size_t *out) {
    char text[32];
    char *end = text;
    if (!find(description, key, text, sizeof text)) return false;
    if (text[0] >= '0' && text[0] <= '9') *out = strtoull(text, &end, 10);
    if (end == text || *end != '\0') return refuse("%s=%s is not a number", key, text);
    if (*out < low || *out > high) return refuse("%s=%s is not within %zu to %zu", key, text, low, high);
    return true;
}

static bool find_int(const char *description, const char *key, int low, int high, int *out) {
    size_t number = 0;
    if (!find_number(description, key, (size_t)low, (size_t)high, &number)) return false;
    *out = (int)number;
    return true;
}

static bool read_card(const char *description, Card *out) {
    if (!find(description, "name", out->name, sizeof out->name)) return false;
    for (const char *c = out->name; *c; c++) {
        bool plain = *c >= ' ' && *c <= '~' && *c != '"' && *c != '\\';
        if (!plain) return refuse("name holds a character that is not allowed");
    }
    bool numbers = find_int(description, "major", 7, 12, &out->major) &&
                   find_int(description, "minor", 0, 9, &out->minor) &&
                   find_int(description, "sms", 1, 1024, &out->sms) &&
                   find_int(description, "smem_sm", 48 << 10, 1 << 20, &out->smem_sm) &&
                   find_int(description, "smem_block", 48 << 10, 1 << 20, &out->smem_block) &&
                   find_int(description, "l2", 1 << 16, 1 << 30, &out->l2) &&
                   find_number(description, "total", 64 * MIB, TIB, &out->total) &&
                   find_number(description, "context", 0, TIB, &out->context) &&
                   find_int(description, "devices", 1, MAX_DEVICES, &out->devices);
    if (!numbers) return false;
    out->described = out->total;
    if (out->context >= out->total) return refuse("context is not below total");
    snprintf(out->shown, sizeof out->shown, "%s (virtual)", out->name);
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++) {
        if (i > 0 && architectures[i].capability > out->major * 10 + out->minor) break;
        out->threads_sm = architectures[i].threads_sm;
        out->blocks_sm = architectures[i].blocks_sm;
        out->bus_bits = architectures[i].bus_bits;
        out->memory_khz = architectures[i].memory_khz;
        out->core_khz = architectures[i].core_khz;
    }
    return true;
}

static void read_environment(void) {
    atomic_store(&was_read, true);
    const char *description = getenv(VARIABLE);
    if (description == NULL) {
        refuse("it is not set");
        return;
    }
    Card read = {0};
    if (read_card(description, &read)) the_card = read;
}

const Card *card(void) {
    pthread_once(&once, read_environment);
    return &the_card;
}

bool card_was_read(void) { return atomic_load(&was_read); }

void card_set_total(size_t bytes) {
    card();
    the_card.total = bytes;
}
