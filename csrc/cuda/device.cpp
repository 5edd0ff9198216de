// Launches through the driver API. See device.hpp.
#include "device.hpp"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace zerotrain {
namespace cuda {
namespace {

using Result = int;  // CUresult; 0 is success
using Handle = void*;

// The functions of libcuda.so.1 that are used, by their versioned names.
struct Driver {
  Result (*init)(unsigned);
  Result (*version)(int*);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*device)(int*, int);
  Result (*retain)(Handle*, int);
  Result (*push)(Handle);
  Result (*pop)(Handle*);
  Result (*load)(Handle*, const void*);
  Result (*function)(Handle*, Handle, const char*);
  Result (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);

  Driver() {
    Handle library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    const auto find = [library](auto& into, const char* name) {
      Handle found = dlsym(library, name);
      if (!found) throw std::runtime_error(std::string("the CUDA driver lacks ") + name);
      into = reinterpret_cast<std::decay_t<decltype(into)>>(found);
    };
    find(init, "cuInit");
    find(version, "cuDriverGetVersion");
    find(error_name, "cuGetErrorName");
    find(error_string, "cuGetErrorString");
    find(device, "cuDeviceGet");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(load, "cuModuleLoadData");
    find(function, "cuModuleGetFunction");
    find(launch, "cuLaunchKernel");
    check("cuInit", init(0));
  }

  void check(const std::string& call, Result result) const {
    if (result == 0) return;
    const char *name = nullptr, *text = nullptr;
    error_name(result, &name);
    error_string(result, &text);
    throw std::runtime_error(call + ": " + (name ? name : std::to_string(result)) + (text ? std::string(", ") + text : ""));
  }
};

// Raises again at the next call if libcuda was missing.
const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

// Makes a context current for the calling thread, whatever was current before.
class Current {
 public:
  explicit Current(Handle context) { driver().check("cuCtxPushCurrent", driver().push(context)); }
  ~Current() {
    Handle popped;
    driver().pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

class DeviceKernels : public Kernels {
 public:
  DeviceKernels(const std::string& image, int ordinal) {
    int device = 0;
    driver().check("cuDeviceGet", driver().device(&device, ordinal));
    driver().check("cuDevicePrimaryCtxRetain", driver().retain(&context_, device));
    const Current current(context_);
    driver().check("cuModuleLoadData", driver().load(&module_, image.data()));
  }

 protected:
  void launch(const std::string& name, const void* params, Grid grid, Address stream) override {
    const Current current(context_);
    Handle function = find(name);
    void* arguments[] = {const_cast<void*>(params)};
    driver().check(name, driver().launch(function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1,
                                         static_cast<unsigned>(grid.threads), 1, 1, 0,
                                         reinterpret_cast<Handle>(stream), arguments, nullptr));
  }

 private:
  Handle find(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Handle& function = functions_[name];
    if (!function) driver().check(name, driver().function(&function, module_, name.c_str()));
    return function;
  }

  Handle context_ = nullptr, module_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<std::string, Handle> functions_;
};

}  // namespace

std::unique_ptr<Kernels> device_kernels(const std::string& image, int device) {
  return std::make_unique<DeviceKernels>(image, device);
}

int driver_version() {
  int version = 0;
  driver().check("cuDriverGetVersion", driver().version(&version));
  return version;
}

}  // namespace cuda
}  // namespace zerotrain
