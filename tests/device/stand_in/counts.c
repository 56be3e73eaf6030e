/* Counts, settings from the environment, and words. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t counts[COUNTS];

void count(enum count what)
{
    __atomic_add_fetch(&counts[what], 1, __ATOMIC_RELAXED);
}

EXPORTED void stand_in_counts(uint64_t *into)
{
    memcpy(into, counts, sizeof counts);
}

static void say_in(const char *format, va_list arguments)
{
    char line[4096];
    const char *rank = getenv("RANK");
    int length = snprintf(line, sizeof line, "stand-in of CUDA, rank %s: ", rank ? rank : "0");
    length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    if (write(2, line, length) < 0)
        return;
}

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say_in(format, arguments);
    va_end(arguments);
}

void give_up(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say_in(format, arguments);
    va_end(arguments);
    abort();
}

/* Read once: another thread may be about to change the environment. Tests of ranks that have begun change them here. */
static struct setting {
    const char *name;
    double value;
    bool is_known;
} settings[] = {
    [DEVICES] = {"STAND_IN_DEVICES", 1},
    [CAPABILITY] = {"STAND_IN_CAPABILITY", 80}, /* 80 for 8.0 */
    [GIBIBYTES] = {"STAND_IN_GIB", 80}, /* of memory, on each device */
    [PATIENCE] = {"STAND_IN_PATIENCE_S", 120}, /* in which something moves, or a step hangs */
    [CONNECTIONS] = {"CUDA_DEVICE_MAX_CONNECTIONS", 0}, /* 0: each stream has its own */
    [HAZARDS] = {"STAND_IN_HAZARDS", 1}, /* 2: what copies to the host bring may be spoilt, if nothing is copied from there */
};

double setting(enum setting_name name)
{
    struct setting *of = &settings[name];
    if (!of->is_known) {
        const char *value = getenv(of->name);
        if (value && *value)
            of->value = atof(value);
        of->is_known = true;
    }
    return of->value;
}

EXPORTED void stand_in_set(const char *name, double value)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!strcmp(settings[i].name, name))
            settings[i].value = value, settings[i].is_known = true;
}
