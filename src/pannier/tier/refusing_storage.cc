#include "pannier/tier/refusing_storage.h"

#include <c10/core/StorageImpl.h>

namespace pannier {

c10::Storage make_refusing_storage(std::size_t nbytes, c10::Device device, const std::string& message) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                       at::DataPtr(nullptr, device), nullptr, false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return c10::Storage(std::move(storage));
}

void take_memory(const at::Tensor& tensor, const std::string& message) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);  // A leaf that was made by detach() does not allow it.
  impl->set_storage_keep_dtype(make_refusing_storage(tensor.storage().nbytes(), tensor.device(), message));
}

}  // namespace pannier
