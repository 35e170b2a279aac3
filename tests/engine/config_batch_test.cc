#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

BatchSizes resolve(const char* text, int world_size, std::optional<std::int64_t> loader_batch = std::nullopt) {
  return Config::from_text(text).resolve_batch(world_size, loader_batch);
}

std::string refusal(const char* text, int world_size, std::optional<std::int64_t> loader_batch = std::nullopt) {
  return error_of_call([&] { (void)resolve(text, world_size, loader_batch); });
}

void expect_sizes(const BatchSizes& sizes, std::int64_t train, std::int64_t micro, std::int64_t accumulation) {
  EXPECT_TRUE(sizes.complete);
  EXPECT_EQ(sizes.train, train);
  EXPECT_EQ(sizes.micro, micro);
  EXPECT_EQ(sizes.accumulation, accumulation);
}

TEST(BatchSizes, CompleteEachOther) {
  expect_sizes(resolve(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})", 1), 8, 2, 4);
  expect_sizes(resolve(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})", 2), 8, 2, 2);
  expect_sizes(resolve(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2})", 2), 8, 2, 2);
  expect_sizes(resolve(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4})", 2), 24, 3, 4);
  expect_sizes(resolve(R"({"train_micro_batch_size_per_gpu": 4})", 1), 4, 4, 1);
  expect_sizes(resolve(R"({"train_batch_size": 8})", 2), 8, 4, 1);
  expect_sizes(resolve(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                           "gradient_accumulation_steps": 2})",
                       2),
               8, 2, 2);
}

TEST(BatchSizes, NameTheProductThatFails) {
  EXPECT_THAT(
      refusal(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                          "gradient_accumulation_steps": 1})",
              1),
      AllOf(HasSubstr("train_batch_size 8"), HasSubstr("train_micro_batch_size_per_gpu 2"),
            HasSubstr("gradient_accumulation_steps 1"), HasSubstr("world size 1"), HasSubstr("8 != 2 * 1 * 1")));
  EXPECT_THAT(refusal(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})", 1),
              HasSubstr("10 is not a multiple of 4 * 1, so there is no whole gradient_accumulation_steps"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 7})", 2),
              HasSubstr("7 is not a multiple of 1 * 2, so there is no whole train_micro_batch_size_per_gpu"));
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": 4})", 1),
              HasSubstr("train_batch_size or train_micro_batch_size_per_gpu must be given"));
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": 4})", 1, 2), HasSubstr("must be given"));
  EXPECT_THAT(refusal(R"({"train_micro_batch_size_per_gpu": 2147483647,
                          "gradient_accumulation_steps": 2147483647})",
                      1000),
              HasSubstr("too large"));
}

TEST(BatchSizes, ComeFromTheLoaderWhereAuto) {
  const char* micro = R"({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2})";
  expect_sizes(resolve(micro, 2, 4), 16, 4, 2);
  EXPECT_FALSE(resolve(micro, 2).complete);
  EXPECT_EQ(resolve(micro, 2).accumulation, 2);
  const char* all = R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                        "gradient_accumulation_steps": "auto"})";
  expect_sizes(resolve(all, 2, 4), 8, 4, 1);
  EXPECT_FALSE(resolve(all, 2).complete);
  const char* train = R"({"train_batch_size": "auto", "gradient_accumulation_steps": 1})";
  expect_sizes(resolve(train, 1, 3), 3, 3, 1);
  EXPECT_FALSE(resolve(train, 1).complete);
  expect_sizes(resolve(R"({"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto"})", 2, 4), 16, 4, 2);
}

TEST(BatchSizes, AreCheckedAgainstTheLoader) {
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto",
                          "gradient_accumulation_steps": 1})",
                      1, 2),
              HasSubstr("8 != 2 * 1 * 1"));
  EXPECT_THAT(refusal("{}", 1, 0), HasSubstr("the batch of the loader must be positive, got 0"));
}

TEST(BatchSizes, FollowFromTheRestWithoutALoader) {
  expect_sizes(resolve(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto",
                           "gradient_accumulation_steps": 2})",
                       2),
               8, 2, 2);
  const char* open = R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"})";
  EXPECT_FALSE(resolve(open, 2).complete);
  EXPECT_THAT(refusal(open, 3), HasSubstr("8 is not a multiple of 1 * 3"));
  expect_sizes(resolve(R"({"train_batch_size": 8, "gradient_accumulation_steps": "auto"})", 2), 8, 4, 1);
}

TEST(BatchSizes, NeedAWorld) { EXPECT_THROW((void)resolve("{}", 0), InternalError); }

TEST(LeftOverAuto, IsAnErrorWhereTheKeyDecidesSomething) {
  const Config config = Config::from_text(R"({
      "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto", "total_num_steps": "auto"}},
      "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                            "stage3_gather_16bit_weights_on_model_save": "auto"}})");
  const std::string all = error_of_call([&] { config.require_resolved(true, true); });
  EXPECT_THAT(all, HasSubstr("configuration: 6 errors"));
  for (const char* path : {"gradient_clipping", "bf16.enabled", "fp16.enabled", "optimizer.params.lr",
                           "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"}) {
    EXPECT_THAT(all, HasSubstr(std::string("\n  ") + path + ": still \"auto\""));
  }
  EXPECT_THAT(error_of_call([&] { config.require_resolved(false, false); }), HasSubstr("3 errors"));
  EXPECT_EQ(config.zero.bucket_numel, std::int64_t{16} << 20);
  EXPECT_FALSE(config.scheduler->options.warmup_max_lr.given());
  EXPECT_EQ(config.dtype, Dtype::kFp32);
}

TEST(LeftOverAuto, IsNotedWhereItIsDecidedHere) {
  EXPECT_THAT(notes_of(R"({"zero_optimization": {"reduce_bucket_size": "auto", "sub_group_size": "auto"}})"),
              HasSubstr("left \"auto\", decided here: zero_optimization.reduce_bucket_size, "
                        "zero_optimization.sub_group_size"));
  EXPECT_NO_THROW(Config::from_text("{}").require_resolved(true, true));
}

TEST(LeftOverAuto, CountsForStageAndDevices) {
  const Config config =
      Config::from_text(R"({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}})");
  EXPECT_THAT(error_of_call([&] { config.require_resolved(false, false); }),
              AllOf(HasSubstr("zero_optimization.stage"), HasSubstr("zero_optimization.offload_optimizer.device")));
}

}  // namespace
}  // namespace pannier
