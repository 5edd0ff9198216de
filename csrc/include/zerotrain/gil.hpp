// Releases the GIL around native work. Used by all bindings in place of nanobind's guard.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace zerotrain {

// A thread that returns while the interpreter shuts down cannot take the GIL again: Python ends it by unwinding its
// stack, which would run into the guard's own destructor and abort the process, whose exit code would be lost. It
// waits here instead, as it does from Python 3.14 on, until the process has ended.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace zerotrain
