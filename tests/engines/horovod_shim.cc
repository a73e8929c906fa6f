// Horovod's core without a framework: sums and broadcasts of raw host memory, for ctypes.
//
// For tests. Horovod offers its collectives to C++ only, so this file is compiled together with Horovod's own
// sources (build_horovod.py). Names contain "horovod" because its linker script exports no others.

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../common/operations.h"

namespace {

using namespace horovod::common;

class Memory : public PersistentBuffer {
public:
  explicit Memory(int64_t size) : bytes_(size) {}
  const void* AccessData(std::shared_ptr<OpContext>) const override { return bytes_.data(); }

private:
  std::vector<char> bytes_;
};

// Memory of the caller, who keeps it until the operation is complete.
class HostArray : public Tensor {
public:
  HostArray(void* data, int64_t count, int64_t size, DataType dtype)
      : data_(data), count_(count), size_(size), dtype_(dtype) {}
  const DataType dtype() const override { return dtype_; }
  const TensorShape shape() const override { return TensorShape({count_}); }
  const void* data() const override { return data_; }
  int64_t size() const override { return size_; }

private:
  void* data_;
  int64_t count_, size_;
  DataType dtype_;
};

// All outputs are in place; only the buffer for fusion is asked for.
class Context : public OpContext {
public:
  Status AllocatePersistent(int64_t size, std::shared_ptr<PersistentBuffer>* made) override {
    *made = std::make_shared<Memory>(size);
    return Status::OK();
  }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override {
    return Status::PreconditionError("an output that is not in place");
  }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override {
    return Status::PreconditionError("zeros for a process that has joined");
  }
  Framework framework() const override { return Framework::PYTORCH; }
};

struct Operation {
  int left;  // arrays that are not complete
  std::string error;
};

std::mutex mutex;
std::unordered_map<int, Operation> operations;
int last = 0;
thread_local std::string told;

int Begin(int arrays) {
  std::lock_guard<std::mutex> guard(mutex);
  operations[++last] = {arrays, ""};
  return last;
}

StatusCallback Completes(int handle) {
  return [handle](const Status& status) {
    std::lock_guard<std::mutex> guard(mutex);
    auto& operation = operations[handle];
    operation.left--;
    if (!status.ok()) {
      operation.error = status.reason();
    }
  };
}

// The handle, or -1 with a text for horovod_shim_error.
int Begun(int handle, const Status& status) {
  if (status.ok()) {
    return handle;
  }
  std::lock_guard<std::mutex> guard(mutex);
  operations.erase(handle);
  told = status.reason();
  return -1;
}

} // namespace

extern "C" {

const char* horovod_shim_error() { return told.c_str(); }

int horovod_shim_allreduce(void** data, const int64_t* counts, const int64_t* sizes, int arrays, int dtype,
                           const char* name) {
  auto handle = Begin(arrays);
  std::vector<std::shared_ptr<OpContext>> contexts;
  std::vector<std::shared_ptr<Tensor>> tensors;
  std::vector<ReadyEventList> events(arrays);
  std::vector<std::string> names;
  std::vector<StatusCallback> callbacks;
  for (int i = 0; i < arrays; i++) {
    contexts.push_back(std::make_shared<Context>());
    tensors.push_back(
        std::make_shared<HostArray>(data[i], counts[i], sizes[i], static_cast<DataType>(dtype)));
    names.push_back(std::string(name) + "_" + std::to_string(i));
    callbacks.push_back(Completes(handle));
  }
  auto outputs = tensors;
  return Begun(handle, EnqueueTensorAllreduces(contexts, tensors, outputs, events, names, CPU_DEVICE_ID,
                                               callbacks, ReduceOp::SUM));
}

int horovod_shim_broadcast(void* data, int64_t count, int64_t size, int dtype, int root, const char* name) {
  auto handle = Begin(1);
  auto tensor = std::make_shared<HostArray>(data, count, size, static_cast<DataType>(dtype));
  return Begun(handle, EnqueueTensorBroadcast(std::make_shared<Context>(), tensor, tensor, root,
                                              ReadyEventList(), name, CPU_DEVICE_ID, Completes(handle)));
}

int horovod_shim_poll(int handle) {
  std::lock_guard<std::mutex> guard(mutex);
  return operations.at(handle).left == 0;
}

// To be called once, after a poll that was true: 0, or -1 with a text for horovod_shim_error.
int horovod_shim_take(int handle) {
  std::lock_guard<std::mutex> guard(mutex);
  told = operations.at(handle).error;
  operations.erase(handle);
  return told.empty() ? 0 : -1;
}
}
