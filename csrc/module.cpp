// Python module zerotrain.runtime._native. Typed stub: runtime/zerotrain/runtime/_native.pyi.
#include "zerotrain/bind.hpp"

NB_MODULE(_native, m) {
  // A script may end with an engine open; objects that then remain in the interpreter are no error.
  nanobind::set_leak_warnings(false);
  bind_kernels(m);
  bind_cuda(m);
  bind_io(m);
  bind_seal(m);
}
