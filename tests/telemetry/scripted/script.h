/* A scenario: what each device says at each moment. Lines of `gpu key value from until every`, the last one that holds wins.
 *
 *   gpu      number of the device, or * for all
 *   value    a number, E<code> for an error of the library, or "text" without blanks
 *   from     first second, until: the second after the last; every: the pair repeats with this period (0 = once)
 *
 * Environment: SCRIPTED_DEVICES is the file. SCRIPTED_CLOCK names a file with the Unix time of second 0; before it exists the
 * scenario stands at second 0. Without that variable second 0 is the library's start. SCRIPTED_CALLS: every call that changes a
 * device is appended there. SCRIPTED_STATE: folder that keeps what was set, so that other processes see it.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_ENTRIES 4096
#define MAX_BREAKS 8192

typedef struct {
    int gpu, error;
    char key[40], text[128];
    double value, from, until, every;
} Entry;

static Entry entries[MAX_ENTRIES];
static int num_entries = 0, loaded = 0;
static double origin = 0.0;

static double now_unix(void) {
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    return moment.tv_sec + 1e-9 * moment.tv_nsec;
}

static void load_script(void) {
    if (loaded) return;
    loaded = 1;
    origin = getenv("SCRIPTED_CLOCK") ? 0.0 : now_unix();
    FILE *file = fopen(getenv("SCRIPTED_DEVICES") ? getenv("SCRIPTED_DEVICES") : "", "r");
    if (!file) return;
    char gpu[16], value[128];
    Entry entry;
    while (num_entries < MAX_ENTRIES &&
           fscanf(file, "%15s %39s %127s %lf %lf %lf", gpu, entry.key, value, &entry.from, &entry.until, &entry.every) == 6) {
        entry.gpu = gpu[0] == '*' ? -1 : atoi(gpu);
        entry.error = value[0] == 'E' ? atoi(value + 1) : 0;
        entry.value = atof(value);
        strcpy(entry.text, value);
        entries[num_entries++] = entry;
    }
    fclose(file);
}

/* The scenario's second. */
static double script_time(void) {
    load_script();
    if (origin == 0.0) {
        FILE *file = fopen(getenv("SCRIPTED_CLOCK"), "r");
        if (!file) return 0.0;
        if (fscanf(file, "%lf", &origin) != 1) origin = 0.0;
        fclose(file);
        if (origin == 0.0) return 0.0;
    }
    double second = now_unix() - origin;
    return second > 0.0 ? second : 0.0;
}

static int matches(const Entry *entry, int gpu, const char *key) {
    return (entry->gpu == -1 || entry->gpu == gpu) && !strcmp(entry->key, key);
}

static int holds(const Entry *entry, double second) {
    double start = entry->from;
    if (entry->every > 0.0 && second >= start) start += entry->every * floor((second - start) / entry->every);
    return second >= start && second < start + (entry->until - entry->from);
}

/* The entry that holds; NULL where the scenario says nothing. */
static const Entry *entry_at(int gpu, const char *key, double second) {
    load_script();
    for (int index = num_entries - 1; index >= 0; index--)
        if (matches(&entries[index], gpu, key) && holds(&entries[index], second)) return &entries[index];
    return NULL;
}

static double level_at(int gpu, const char *key, double second, double otherwise) {
    const Entry *entry = entry_at(gpu, key, second);
    return entry && !entry->error ? entry->value : otherwise;
}

static const char *text_of(int gpu, const char *key) {
    const Entry *entry = entry_at(gpu, key, script_time());
    return entry ? entry->text : "";
}

static int compare(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

/* The integral of a key from second 0 to `second`: every level is constant between two breaks. */
static double integral_to(int gpu, const char *key, double second) {
    static __thread double breaks[MAX_BREAKS];
    int count = 0;
    breaks[count++] = 0.0;
    for (int index = 0; index < num_entries; index++) {
        const Entry *entry = &entries[index];
        if (!matches(entry, gpu, key)) continue;
        for (double shift = 0.0; entry->from + shift < second && count < MAX_BREAKS - 3; shift += entry->every) {
            breaks[count++] = entry->from + shift;
            if (entry->until + shift < second) breaks[count++] = entry->until + shift;
            if (entry->every <= 0.0) break;
        }
    }
    breaks[count++] = second;
    qsort(breaks, count, sizeof(double), compare);
    double sum = 0.0;
    for (int index = 1; index < count; index++) {
        double start = breaks[index - 1], end = breaks[index];
        if (end > start && start >= 0.0) sum += (end - start) * level_at(gpu, key, 0.5 * (start + end), 0.0);
    }
    return sum;
}

static void log_call(const char *format, ...) {
    if (!getenv("SCRIPTED_CALLS")) return;
    FILE *file = fopen(getenv("SCRIPTED_CALLS"), "a");
    if (!file) return;
    va_list values;
    va_start(values, format);
    fprintf(file, "%.6f %d ", now_unix(), (int)getpid());
    vfprintf(file, format, values);
    fprintf(file, "\n");
    va_end(values);
    fclose(file);
}

/* What a device was set to, kept for other processes. */
static double state_of(const char *vendor, int gpu, double otherwise) {
    char path[512];
    double value = otherwise;
    if (!getenv("SCRIPTED_STATE")) return otherwise;
    snprintf(path, sizeof path, "%s/%s-%d", getenv("SCRIPTED_STATE"), vendor, gpu);
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    if (fscanf(file, "%lf", &value) != 1) value = otherwise;
    fclose(file);
    return value;
}

static void keep_state(const char *vendor, int gpu, double value) {
    char path[512];
    if (!getenv("SCRIPTED_STATE")) return;
    snprintf(path, sizeof path, "%s/%s-%d", getenv("SCRIPTED_STATE"), vendor, gpu);
    FILE *file = fopen(path, "w");
    if (!file) return;
    fprintf(file, "%.3f\n", value);
    fclose(file);
}
