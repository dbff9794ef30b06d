/* libamd_smi.so that plays a scenario: the functions that our use of amdsmi 7.0.2 calls, with AMD SMI's structures (amdsmi.h).
 * The other symbols that the package resolves at import are generated beside this file as `exports.h`; all of them answer NOT_SUPPORTED.
 *
 * Keys: gpus; uuid, name, bus_id (as one number, see below), hip_id; power_w (drives the energy accumulator and, unless those keys
 * say otherwise, the current power), current_w, average_w, cap_uw, default_cap_uw, min_cap_uw, max_cap_uw, set_cap, resolution_uj,
 * energy_ticks, energy_base, energy_wrap, clock, max_clock, clk_locked, memory_clock, hotspot, vram_temperature, activity, vram_mib,
 * active_<cause>, acc_<cause>, bit_<cause>, violations, process, lost.
 */
#include "script.h"

enum { SUCCESS = 0, INVALID = 1, NOT_SUPPORTED = 2 };
enum { MAX_GPUS = 64, NOT_AVAILABLE = 0xFFFF };

typedef struct { int gpu; } Device;
typedef Device *Handle;
static Device devices[MAX_GPUS];

#pragma pack(push, 1)
typedef struct { uint64_t socket; uint32_t current, average; uint64_t gfx, soc, mem; uint32_t limit; char pad[4]; uint64_t reserved[18]; } PowerInfo;
typedef struct { uint64_t cap, default_cap, dpm_cap, min_cap, max_cap, reserved[3]; } PowerCap;
typedef struct { uint32_t clk, min_clk, max_clk; unsigned char locked, deep_sleep, pad[2]; uint32_t reserved[4]; } Clock;
typedef struct { uint32_t gfx, umc, mm, reserved[13]; } Activity;
typedef struct { uint32_t total, used, reserved[2]; } Vram;
typedef struct { uint32_t render, card, hsa_id, hip_id; char hip_uuid[256]; } Enumeration;
typedef struct { char version[256], date[256], name[256]; } Driver;
typedef struct {
    char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id; uint32_t rev_id;
    char serial[256]; uint32_t oam_id, compute_units; char pad[4]; uint64_t graphics_version; uint32_t subsystem_id, reserved[21];
} Asic;
typedef struct {
    uint64_t reference, time, acc[7], per[6]; unsigned char active[6], pad[2]; uint64_t acc_lists[4][64], per_lists[4][64];
    unsigned char active_lists[4][64]; uint64_t reserved[3][64];
} Violations;
typedef struct {
    char name[256]; uint32_t pid; char pad[4]; uint64_t mem; uint64_t gfx, enc; uint32_t engine_reserved[12];
    uint64_t gtt, cpu, vram; uint32_t memory_reserved[10]; char container[256]; uint32_t occupancy, reserved[11];
} Process;
#pragma pack(pop)

static int get(Handle device, const char *key, double *value) {
    double second = script_time();
    const Entry *lost = entry_at(device->gpu, "lost", second), *entry = entry_at(device->gpu, key, second);
    if (lost && lost->error) return lost->error;
    if (!entry) return NOT_SUPPORTED;
    if (entry->error) return entry->error;
    *value = entry->value;
    return SUCCESS;
}

static double level(Handle device, const char *key, double otherwise) { return level_at(device->gpu, key, script_time(), otherwise); }

int amdsmi_init(uint64_t flags) {
    const Entry *entry = entry_at(0, "init", script_time());
    log_call("amdsmi_init %d", (int)flags);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) devices[gpu].gpu = gpu;
    return entry ? entry->error : SUCCESS;
}

int amdsmi_shut_down(void) { return SUCCESS; }

/* One socket per device. */
int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    uint32_t number = (uint32_t)level_at(0, "gpus", script_time(), 0.0);
    for (uint32_t gpu = 0; sockets && gpu < number; gpu++) sockets[gpu] = &devices[gpu];
    *count = number;
    return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors) {
    if (processors) processors[0] = socket;
    *count = 1;
    return SUCCESS;
}

int amdsmi_get_gpu_device_uuid(Handle device, unsigned *length, char *text) {
    double ignored;
    int code = get(device, "uuid", &ignored);
    if (code == SUCCESS) snprintf(text, *length, "%s", text_of(device->gpu, "uuid"));
    return code;
}

/* bus_id: domain << 16 | bus << 8 | device << 3 | function, AMD SMI's own packing. */
int amdsmi_get_gpu_device_bdf(Handle device, uint64_t *bdf) {
    double value = 0.0;
    int code = get(device, "bus_id", &value);
    *bdf = (uint64_t)value;
    return code;
}

int amdsmi_get_gpu_enumeration_info(Handle device, Enumeration *info) {
    double value = 0.0;
    int code = get(device, "hip_id", &value);
    memset(info, 0, sizeof *info);
    info->hip_id = (uint32_t)value;
    return code;
}

int amdsmi_get_gpu_asic_info(Handle device, Asic *info) {
    double ignored;
    int code = get(device, "name", &ignored);
    memset(info, 0, sizeof *info);
    snprintf(info->market_name, sizeof info->market_name, "%s", text_of(device->gpu, "name"));
    snprintf(info->vendor_name, sizeof info->vendor_name, "AMD");
    info->vendor_id = 0x1002;
    return code;
}

int amdsmi_get_gpu_driver_info(Handle device, Driver *info) {
    (void)device;
    memset(info, 0, sizeof *info);
    snprintf(info->version, sizeof info->version, "6.12.12");
    snprintf(info->name, sizeof info->name, "amdgpu");
    return SUCCESS;
}

int amdsmi_get_power_info(Handle device, PowerInfo *info) {
    double watts = 0.0;
    int code = get(device, "power_w", &watts);
    if (code != SUCCESS) return code;
    memset(info, 0, sizeof *info);
    info->socket = info->current = (uint32_t)level(device, "current_w", watts);
    info->average = (uint32_t)level(device, "average_w", NOT_AVAILABLE);
    return SUCCESS;
}

int amdsmi_get_energy_count(Handle device, uint64_t *ticks, float *resolution, uint64_t *timestamp) {
    double second = script_time(), ignored, joules;
    int code = get(device, "power_w", &ignored);
    const Entry *fixed = entry_at(device->gpu, "energy_ticks", second);
    if (code == SUCCESS && fixed && fixed->error) code = fixed->error;
    *resolution = (float)level(device, "resolution_uj", 15.3);
    joules = integral_to(device->gpu, "power_w", second);
    double count = fixed ? fixed->value : level(device, "energy_base", 0.0) + joules * 1e6 / *resolution;
    double wrap = level(device, "energy_wrap", 0.0);
    *ticks = (uint64_t)(wrap > 0.0 ? fmod(count, wrap) : count);
    *timestamp = (uint64_t)(now_unix() * 1e9);
    return code;
}

int amdsmi_get_power_cap_info(Handle device, uint32_t sensor, PowerCap *info) {
    double cap = 0.0;
    (void)sensor;
    int code = get(device, "cap_uw", &cap);
    memset(info, 0, sizeof *info);
    info->cap = (uint64_t)state_of("amd", device->gpu, cap);
    info->default_cap = (uint64_t)level(device, "default_cap_uw", cap);
    info->min_cap = (uint64_t)level(device, "min_cap_uw", 0.0);
    info->max_cap = (uint64_t)level(device, "max_cap_uw", cap);
    return code;
}

int amdsmi_set_power_cap(Handle device, uint32_t sensor, uint64_t microwatts) {
    const Entry *entry = entry_at(device->gpu, "set_cap", script_time());
    int code = entry ? entry->error : SUCCESS;
    double low = level(device, "min_cap_uw", 0.0), high = level(device, "max_cap_uw", 1e12);
    if (code == SUCCESS && ((double)microwatts < low || (double)microwatts > high)) code = INVALID;
    log_call("amdsmi_set_power_cap %d %u %llu %d", device->gpu, sensor, (unsigned long long)microwatts, code);
    if (code == SUCCESS) keep_state("amd", device->gpu, (double)microwatts);
    return code;
}

int amdsmi_get_clock_info(Handle device, int kind, Clock *info) {
    double mhz = 0.0;
    int code = get(device, kind == 4 ? "memory_clock" : "clock", &mhz);
    memset(info, 0, sizeof *info);
    info->clk = (uint32_t)mhz;
    info->max_clk = (uint32_t)level(device, kind == 4 ? "max_memory_clock" : "max_clock", mhz);
    info->locked = (unsigned char)level(device, "clk_locked", 0.0);
    return code;
}

int amdsmi_get_gpu_activity(Handle device, Activity *info) {
    double percent = 0.0;
    int code = get(device, "activity", &percent);
    memset(info, 0, sizeof *info);
    info->gfx = (uint32_t)percent;
    return code;
}

int amdsmi_get_gpu_vram_usage(Handle device, Vram *info) {
    double mib = 0.0;
    int code = get(device, "vram_mib", &mib);
    memset(info, 0, sizeof *info);
    info->used = (uint32_t)mib;
    return code;
}

int amdsmi_get_temp_metric(Handle device, int sensor, int metric, int64_t *celsius) {
    double value = 0.0;
    (void)metric;
    int code = get(device, sensor == 1 ? "hotspot" : "vram_temperature", &value);
    *celsius = (int64_t)value;
    return code;
}

/* Firmware ticks of one millisecond; the call blocks as the real one does. */
int amdsmi_get_violation_status(Handle device, Violations *status) {
    static const char *causes[] = {"prochot", "ppt", "socket", "vr", "hbm"};
    char key[40];
    double ignored;
    int code = get(device, "violations", &ignored);
    if (code != SUCCESS) return code;
    usleep(100000);
    double second = script_time();
    memset(status, 0, sizeof *status);
    memset(status->per, 0xFF, sizeof status->per);
    status->time = (uint64_t)(now_unix() * 1e6);
    status->acc[0] = (uint64_t)(second * 1e3);
    for (int cause = 0; cause < 5; cause++) {
        snprintf(key, sizeof key, "active_%s", causes[cause]);
        status->acc[1 + cause] = (uint64_t)(1e3 * integral_to(device->gpu, key, second));
        status->active[cause] = (unsigned char)level_at(device->gpu, key, second, 0.0);
        snprintf(key, sizeof key, "bit_%s", causes[cause]);
        if (level(device, key, 0.0) > 0.0) status->active[cause] = 1;
        snprintf(key, sizeof key, "acc_%s", causes[cause]);
        if (level(device, key, 0.0) < 0.0) status->acc[1 + cause] = UINT64_MAX;
    }
    status->acc[6] = UINT64_MAX;
    return SUCCESS;
}

int amdsmi_get_gpu_process_list(Handle device, uint32_t *count, Process *processes) {
    double pid = 0.0;
    *count = 0;
    if (get(device, "process", &pid) != SUCCESS) return SUCCESS;
    memset(processes, 0, sizeof *processes);
    processes->pid = (uint32_t)pid;
    processes->mem = (uint64_t)(level(device, "process_mib", 0.0) * 1048576.0);
    *count = 1;
    return SUCCESS;
}

/* Every other symbol of the package. */
#define EXPORT(name) int name(void) { return NOT_SUPPORTED; }
#include "exports.h"
