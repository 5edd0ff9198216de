// Python module zerotrain.runtime._native. Typed stub: runtime/zerotrain/runtime/_native.pyi.
#include "zerotrain/bind.hpp"

NB_MODULE(_native, m) {
  bind_kernels(m);
  bind_io(m);
  bind_seal(m);
}
