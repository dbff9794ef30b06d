/* libnvidia-ml.so.1 that plays a scenario: the functions that pynvml calls, with NVML's own structures and return codes (nvml.h).
 *
 * Keys: gpus, driver (of device 0); uuid, name, bus_id; power_mw (drives fields 185, 186, 83), field_<n>, active_<n> (drives the
 * counter of field n, in ns), reasons, sm_clock, memory_clock, max_sm_clock, max_memory_clock, temperature, utilization,
 * memory_mib, limit_mw, enforced_mw, default_mw, min_mw, max_mw, set_limit, sensor_period, energy_base_mj, energy_wrap_mj, lost,
 * mig, mig_instances, mig_uuid_<k>, process (a pid), process_mib, init.
 */
#include "script.h"

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_GPUS = 64, MAX_MIG = 8 };

typedef struct { int gpu, mig; } Device;
typedef Device *Handle;
static Device boards[MAX_GPUS], instances[MAX_GPUS][MAX_MIG];

typedef struct { uint32_t field, scope; int64_t timestamp, latency; uint32_t type, code; union { double d; uint64_t u; } value; } Field;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;

/* A key's level now, or the library's error; a lost board answers nothing else. */
static int get(Handle device, const char *key, double *value) {
    double second = script_time();
    const Entry *lost = entry_at(device->gpu, "lost", second), *entry = entry_at(device->gpu, key, second);
    if (lost && lost->error) return lost->error;
    if (!entry) return NOT_SUPPORTED;
    if (entry->error) return entry->error;
    *value = entry->value;
    return SUCCESS;
}

static int get_unsigned(Handle device, const char *key, unsigned *value) {
    double level;
    int code = get(device, key, &level);
    if (code == SUCCESS) *value = (unsigned)llround(level);
    return code;
}

static int copy_text(Handle device, const char *key, char *text, unsigned size) {
    double ignored;
    int code = get(device, key, &ignored);
    if (code == SUCCESS) snprintf(text, size, "%s", text_of(device->gpu, key));
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    double second = script_time();
    const Entry *entry = entry_at(0, "init", second);
    log_call("nvmlInit %u", flags);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        boards[gpu] = (Device){gpu, -1};
        for (int mig = 0; mig < MAX_MIG; mig++) instances[gpu][mig] = (Device){gpu, mig};
    }
    return entry ? entry->error : SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "scripted error" : "success"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "%s", text_of(0, "driver"));
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)level_at(0, "gpus", script_time(), 0.0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *device) {
    double ignored;
    if (index >= MAX_GPUS) return INVALID;
    *device = &boards[index];
    int code = get(*device, "uuid", &ignored);
    return code;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *device) {
    for (int gpu = 0; gpu < (int)level_at(0, "gpus", script_time(), 0.0); gpu++)
        if (!strcmp(uuid, text_of(gpu, "uuid"))) {
            *device = &boards[gpu];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle device, char *text, unsigned size) {
    char key[40];
    if (device->mig < 0) return copy_text(device, "uuid", text, size);
    snprintf(key, sizeof key, "mig_uuid_%d", device->mig);
    return copy_text(device, key, text, size);
}

int nvmlDeviceGetName(Handle device, char *text, unsigned size) { return copy_text(device, "name", text, size); }

int nvmlDeviceGetPciInfo_v3(Handle device, Pci *info) {
    memset(info, 0, sizeof *info);
    return copy_text(device, "bus_id", info->bus_id, sizeof info->bus_id);
}

/* Milliwatts of the last update of the sensor. */
static double power_mw(int gpu, double second) {
    double period = level_at(gpu, "sensor_period", second, 0.0);
    return level_at(gpu, "power_mw", period > 0.0 ? period * floor(second / period) : second, 0.0);
}

static double average_mw(int gpu, double second) {
    if (second < 1e-3) return power_mw(gpu, second);
    double window = second < 1.0 ? second : 1.0;
    return (integral_to(gpu, "power_mw", second) - integral_to(gpu, "power_mw", second - window)) / window;
}

static double energy_mj(int gpu, double second) {
    double energy = level_at(gpu, "energy_base_mj", second, 0.0) + integral_to(gpu, "power_mw", second);
    double wrap = level_at(gpu, "energy_wrap_mj", second, 0.0);
    return wrap > 0.0 ? fmod(energy, wrap) : energy;
}

static int read_field(Handle device, uint32_t number, double *value) {
    char key[40], active[40];
    double second = script_time();
    snprintf(key, sizeof key, "field_%u", number);
    snprintf(active, sizeof active, "active_%u", number);
    int code = get(device, key, value);
    if (code != NOT_SUPPORTED || entry_at(device->gpu, key, second)) return code;
    if (number == 186 || number == 185 || number == 83) {
        code = get(device, "power_mw", value);
        if (code == SUCCESS && number == 186) *value = power_mw(device->gpu, second);
        if (code == SUCCESS && number == 185) *value = average_mw(device->gpu, second);
        if (code == SUCCESS && number == 83) *value = energy_mj(device->gpu, second);
        return code;
    }
    code = get(device, active, value);
    if (code == SUCCESS) *value = 1e9 * integral_to(device->gpu, active, second);
    return code;
}

int nvmlDeviceGetFieldValues(Handle device, int count, Field *fields) {
    double ignored;
    const Entry *all = entry_at(device->gpu, "fields", script_time());
    if (device->mig >= 0) return NOT_SUPPORTED;
    if (all && all->error) return all->error;
    int code = get(device, "uuid", &ignored);
    if (code != SUCCESS) return code;
    for (int index = 0; index < count; index++) {
        double value = 0.0;
        fields[index].code = (uint32_t)read_field(device, fields[index].field, &value);
        fields[index].type = 3;
        fields[index].value.u = (uint64_t)llround(value);
        fields[index].timestamp = (int64_t)(now_unix() * 1e6);
    }
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Handle device, unsigned *milliwatts) {
    double value = 0.0;
    int code = get(device, "power_usage", &value);
    if (code == NOT_SUPPORTED && !entry_at(device->gpu, "power_usage", script_time())) {
        code = get(device, "power_mw", &value);
        value = average_mw(device->gpu, script_time());
    }
    if (code == SUCCESS) *milliwatts = (unsigned)llround(value);
    return device->mig >= 0 ? NOT_SUPPORTED : code;
}

int nvmlDeviceGetTotalEnergyConsumption(Handle device, unsigned long long *millijoules) {
    double value = 0.0;
    int code = read_field(device, 83, &value);
    if (code == SUCCESS) *millijoules = (unsigned long long)llround(value);
    return device->mig >= 0 ? NOT_SUPPORTED : code;
}

static int reasons(Handle device, const char *key, unsigned long long *mask) {
    double value = 0.0;
    int code = get(device, key, &value);
    if (code == SUCCESS) *mask = (unsigned long long)value;
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(Handle device, unsigned long long *mask) { return reasons(device, "reasons", mask); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Handle device, unsigned long long *mask) {
    return reasons(device, entry_at(device->gpu, "old_reasons", script_time()) ? "old_reasons" : "reasons", mask);
}

int nvmlDeviceGetClockInfo(Handle device, int kind, unsigned *mhz) {
    return get_unsigned(device, kind == 2 ? "memory_clock" : "sm_clock", mhz);
}

int nvmlDeviceGetMaxClockInfo(Handle device, int kind, unsigned *mhz) {
    return get_unsigned(device, kind == 2 ? "max_memory_clock" : "max_sm_clock", mhz);
}

int nvmlDeviceGetTemperature(Handle device, int sensor, unsigned *celsius) {
    (void)sensor;
    return get_unsigned(device, "temperature", celsius);
}

int nvmlDeviceGetUtilizationRates(Handle device, Utilization *rates) {
    int code = get_unsigned(device, "utilization", &rates->gpu);
    rates->memory = 0;
    return device->mig >= 0 ? NOT_SUPPORTED : code;
}

int nvmlDeviceGetMemoryInfo(Handle device, Memory *memory) {
    double mib = 0.0;
    int code = get(device, device->mig >= 0 ? "mig_memory_mib" : "memory_mib", &mib);
    memory->total = 80ull << 30;
    memory->used = (unsigned long long)(mib * 1048576.0);
    memory->free = memory->total - memory->used;
    return code;
}

int nvmlDeviceGetPowerManagementLimit(Handle device, unsigned *milliwatts) {
    int code = get_unsigned(device, "limit_mw", milliwatts);
    if (code == SUCCESS) *milliwatts = (unsigned)state_of("nvidia", device->gpu, *milliwatts);
    return code;
}

/* The lowest of what was asked for and what the board allows by itself. */
int nvmlDeviceGetEnforcedPowerLimit(Handle device, unsigned *milliwatts) {
    unsigned own = 0;
    int code = nvmlDeviceGetPowerManagementLimit(device, milliwatts);
    if (code == SUCCESS && get_unsigned(device, "enforced_mw", &own) == SUCCESS && own < *milliwatts) *milliwatts = own;
    return code;
}

int nvmlDeviceGetPowerManagementDefaultLimit(Handle device, unsigned *milliwatts) {
    return get_unsigned(device, "default_mw", milliwatts);
}

int nvmlDeviceGetPowerManagementLimitConstraints(Handle device, unsigned *low, unsigned *high) {
    int code = get_unsigned(device, "min_mw", low);
    return code == SUCCESS ? get_unsigned(device, "max_mw", high) : code;
}

int nvmlDeviceSetPowerManagementLimit(Handle device, unsigned milliwatts) {
    unsigned low = 0, high = 0;
    const Entry *entry = entry_at(device->gpu, "set_limit", script_time());
    int code = entry ? entry->error : SUCCESS;
    if (code == SUCCESS && nvmlDeviceGetPowerManagementLimitConstraints(device, &low, &high) == SUCCESS)
        code = milliwatts < low || milliwatts > high ? INVALID : SUCCESS;
    log_call("nvmlDeviceSetPowerManagementLimit %d %u %d", device->gpu, milliwatts, code);
    if (code == SUCCESS) keep_state("nvidia", device->gpu, milliwatts);
    return code;
}

int nvmlDeviceGetMigMode(Handle device, unsigned *current, unsigned *pending) {
    int code = get_unsigned(device, "mig", current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned *count) { return get_unsigned(device, "mig_slots", count); }

int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned index, Handle *instance) {
    char key[40];
    snprintf(key, sizeof key, "mig_uuid_%u", index);
    if (index >= MAX_MIG || !entry_at(device->gpu, key, script_time())) return NOT_FOUND;
    *instance = &instances[device->gpu][index];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle instance, Handle *device) {
    *device = &boards[instance->gpu];
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, Process *processes) {
    double pid = 0.0, mib = 0.0;
    int code = get(device, "process", &pid);
    if (code == NOT_SUPPORTED && !entry_at(device->gpu, "process", script_time())) {
        *count = 0;
        return SUCCESS;
    }
    if (code != SUCCESS) return code;
    unsigned room = *count;
    *count = 1;
    if (!processes || !room) return INSUFFICIENT_SIZE;
    get(device, "process_mib", &mib);
    processes[0] = (Process){(unsigned)pid, (unsigned long long)(mib * 1048576.0), ~0u, ~0u};
    return SUCCESS;
}
