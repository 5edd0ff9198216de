// Descriptors of this process alone: a child that it forks closes its copies before any other code runs there.
//
// A child may outlive its parent for hours (a data loader's worker after a SIGKILL): a copy of a spill file's
// descriptor would keep the file's space, and O_CLOEXEC is for programs that are executed, not for forks.
#pragma once

#include <functional>

namespace zerotrain {

// Calls `open` and hides the descriptor that it returns from forked children, also those of other threads: no fork
// happens in between. Passes -1 with errno, and exceptions, through.
int open_own(const std::function<int()>& open);

// Closes a descriptor of open_own.
void close_own(int fd);

}  // namespace zerotrain
