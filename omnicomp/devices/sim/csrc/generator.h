// Random numbers of the device: those of the host's generator with the same seed.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex index = -1);
at::Generator new_generator(c10::DeviceIndex index = -1);
// The host generator that holds the state of one of ours; what the CPU's kernels draw from.
at::Generator host_twin(const at::Generator& generator);

} // namespace sim
