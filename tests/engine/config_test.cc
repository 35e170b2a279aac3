#include "pannier/engine/config.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "pannier/base/error.h"
#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// A folder that is gone after the test.
class ConfigFile : public ::testing::Test {
 protected:
  ConfigFile() { std::filesystem::create_directories(folder_); }
  ~ConfigFile() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }

 private:
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("pannier_config_test_" + std::to_string(::getpid()));
};

// The two configurations of a widely copied article on ZeRO-Offload, as they stand there.
constexpr const char* kArticle = R"({
  "train_batch_size": "auto",
  "gradient_accumulation_steps": 1,
  "optimizer": {
    "type": "Adam",
    "params": {
      "lr": 1e-5
    }
  },
  "fp16": {
    "enabled": true,
    "initial_scale_power": 15
  },
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true
    },
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 50000000,
    "stage3_prefetch_size": 5,
    "stage3_param_persistence_threshold": 100000,
    "stage3_max_live_params": 1000000000,
    "stage3_max_unused_params": 1000000000
  }
})";

constexpr const char* kNvmeFragment = R"(// NVMe Offload 示例配置片段
"offload_optimizer": {
  "device": "nvme",
  "nvme_path": "/path/to/nvme_cache", // NVMe 挂载点
  "buffer_count": 5,
  "buffer_size": 104857600
})";

TEST(Config, AcceptsTheArticleWordForWord) {
  const Config config = Config::from_text(kArticle);
  EXPECT_TRUE(config.auto_batch.train);
  EXPECT_EQ(config.gradient_accumulation_steps, 1);
  ASSERT_TRUE(config.optimizer);
  EXPECT_EQ(config.optimizer->algorithm, kernels::Algorithm::kAdamW);
  EXPECT_EQ(config.optimizer->hyper.lr, 1e-5);
  EXPECT_EQ(config.dtype, Dtype::kFp16);
  EXPECT_EQ(config.loss_scale.initial_scale_power, 15);
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.zero.optimizer_home, Home::kHost);
  EXPECT_EQ(config.zero.bucket_numel, 50'000'000);
  EXPECT_EQ(config.zero.prefetch_bucket_numel, 5);
  EXPECT_EQ(config.zero.param_persistence_numel, 100'000);
  EXPECT_EQ(config.zero.max_live_numel, 1'000'000'000);
  EXPECT_EQ(config.zero.max_reuse_distance_numel, 1'000'000'000);
  for (const char* alias : {"stage3_prefetch_size", "stage3_max_live_params", "stage3_max_unused_params"}) {
    EXPECT_THAT(notes_of(kArticle), HasSubstr(std::string("zero_optimization.") + alias + ": another name, read as"));
  }
  EXPECT_NO_THROW(config.require_supported());
  EXPECT_NO_THROW(config.require_resolved(true, true));
  const BatchSizes sizes = config.resolve_batch(2, 4);
  EXPECT_EQ(sizes.train, 8);
}

TEST(Config, AcceptsTheNvmeFragmentUnderZero) {
  const Config config =
      Config::from_text(R"({"zero_optimization": {"stage": 3, )" + std::string("\n") + kNvmeFragment + "}}");
  EXPECT_EQ(config.zero.optimizer_home, Home::kNvme);
  EXPECT_THAT(config.zero.optimizer_nvme_paths, ElementsAre("/path/to/nvme_cache"));
  EXPECT_EQ(config.zero.buffer_count, 5);
  EXPECT_EQ(config.zero.buffer_nbytes, 104857600U);
}

TEST(Config, NeedsNoKnobs) {
  const Config config =
      Config::from_text(R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})");
  EXPECT_EQ(config.zero.stage, 2);
  EXPECT_EQ(config.zero.bucket_numel, std::int64_t{16} << 20);
  EXPECT_FALSE(config.zero.bucket_given);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.dtype, Dtype::kFp32);
  EXPECT_EQ(config.grad_accum_dtype, Dtype::kFp32);
  EXPECT_TRUE(config.check_grad_overflow);
  EXPECT_THAT(config.notes, IsEmpty());
  EXPECT_FALSE(config.resolve_batch(1, std::nullopt).complete);
  EXPECT_EQ(config.resolve_batch(2, 4).train, 8);
  EXPECT_EQ(Config::from_text("{}").zero.stage, 0);
}

TEST(Config, AllowsCommentsOnly) {
  EXPECT_EQ(Config::from_text("{ /* a */ \"train_batch_size\": 8 // b\n}").train_batch_size, 8);
  EXPECT_THAT(error_of("{\"train_batch_size\": 8,}"), HasSubstr("configuration:1:24: not JSON"));
}

TEST(Config, SaysWhereTextIsNotJson) {
  EXPECT_THAT(error_of("{\n  \"fp16\": {]\n}"), StartsWith("configuration:2:12: not JSON: "));
  EXPECT_THAT(error_of("{\"a\": "), StartsWith("configuration:1:7: not JSON: "));
  EXPECT_THAT(error_of("{\"steps_per_print\": NaN}"), StartsWith("configuration:1:21: NaN is not a value"));
  EXPECT_THAT(error_of("{\"steps_per_print\": 1e999}"), HasSubstr("not JSON"));
  EXPECT_THAT(error_of(" \n"), HasSubstr("the text is empty"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("wanted a JSON object, got [1]"));
  EXPECT_THAT(error_of("{\"a\": \"unfinished"), HasSubstr("not JSON"));
  EXPECT_THAT(error_of("{ /* unfinished"), HasSubstr("not JSON"));
}

TEST(Config, RefusesAKeyThatOccursTwice) {
  EXPECT_EQ(error_of(R"({"fp16": {"enabled": true, "enabled": false}})"), "configuration: fp16.enabled: occurs twice");
  EXPECT_EQ(error_of(R"({"bf16": {}, "bf16": {}})"), "configuration: bf16: occurs twice");
}

TEST(Config, ReadsInfinityAsPythonWritesIt) {
  EXPECT_TRUE(std::isinf(Config::from_text("{\"steps_per_print\": Infinity}").steps_per_print.value()));
  EXPECT_THAT(error_of("{\"steps_per_print\": -Infinity}"), HasSubstr("got -Infinity"));
  EXPECT_THAT(error_of("{\"gradient_predivide_factor\": Infinity}"), HasSubstr("got Infinity"));
  EXPECT_EQ(Config::from_text("{\"gradient_clipping\": Infinity}").gradient_clipping, 0);
  EXPECT_EQ(Config::from_text("{\"steps_per_print\": 10, /* Infinity NaN */ \"log_level\": \"NaN \\\" Infinity\"}")
                .steps_per_print,
            10);
}

TEST(Config, TakesNullAndNoneAsNotGiven) {
  const Config config = Config::from_text(R"({"train_batch_size": null, "optimizer": null, "zero_optimization": {
      "stage": 2, "offload_param": {"device": "none", "nvme_path": null},
      "offload_optimizer": {"device": null, "nvme_path": "none"}}})");
  EXPECT_FALSE(config.train_batch_size);
  EXPECT_FALSE(config.optimizer);
  EXPECT_EQ(config.zero.param_home, Home::kDevice);
  EXPECT_EQ(config.zero.optimizer_home, Home::kDevice);
  EXPECT_THAT(config.zero.optimizer_nvme_paths, IsEmpty());
}

TEST(Config, ExpandsDottedKeysAndRoundsSizes) {
  const char* text = R"({"zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 921.6,
                         "zero_optimization.stage3_prefetch_bucket_size": 829.44, "bf16.enabled": true})";
  const Config config = Config::from_text(text);
  EXPECT_EQ(config.zero.bucket_numel, 922);
  EXPECT_EQ(config.zero.prefetch_bucket_numel, 829);
  EXPECT_EQ(config.dtype, Dtype::kBf16);
  EXPECT_THAT(notes_of(text), AllOf(HasSubstr("zero_optimization.reduce_bucket_size: a dotted key, read as nested"),
                                    HasSubstr("zero_optimization.reduce_bucket_size: 921.6 rounded to 922")));
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true}, "fp16.enabled": false})"),
              HasSubstr("fp16.enabled: given twice, dotted and nested"));
  EXPECT_THAT(error_of(R"({"zero_optimization": 3, "zero_optimization.stage": 3})"), HasSubstr("given twice"));
  EXPECT_THAT(error_of(R"({"zero.stage": 3})"), HasSubstr("zero: unknown key; did you mean zero_optimization?"));
  const auto sizes = Config::from_text(
      R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}, "zero_optimization.reduce_bucket_size": 921.6})");
  EXPECT_EQ(sizes.zero.bucket_numel, 7);
}

TEST(Config, ReadsPanniersOwnKeys) {
  const Config config = Config::from_text(R"({"pannier": {"device_memory": "24GiB", "host_memory": 1e9,
      "memory_timeline": true, "collective_timeout": 60, "threads": 4}})");
  EXPECT_EQ(config.pannier.device_memory_nbytes, std::size_t{24} << 30);
  EXPECT_EQ(config.pannier.host_memory_nbytes, 1'000'000'000U);
  EXPECT_TRUE(config.pannier.memory_timeline);
  EXPECT_EQ(config.pannier.collective_timeout_seconds, 60);
  EXPECT_EQ(config.pannier.threads, 4);
  EXPECT_THAT(
      error_of(R"({"pannier": {"device_memory": "24 parsec"}})"),
      HasSubstr("pannier.device_memory: wanted bytes or a size such as \"24GiB\", of at least 1, got \"24 parsec\""));
  EXPECT_THAT(error_of(R"({"pannier": {"host_memory": 0}})"), HasSubstr("pannier.host_memory: wanted bytes"));
}

TEST(Config, ReadsTheRest) {
  const Config config = Config::from_text(R"({"managed_gradient_accumulation": false, "dataloader_drop_last": true,
      "gradient_clipping": 0, "gradient_allreduce_op": "sum", "wall_clock_breakdown": true, "memory_breakdown": true,
      "dump_state": true, "checkpoint": {"tag_validation": "FAIL"}})");
  EXPECT_FALSE(config.managed_gradient_accumulation);
  EXPECT_TRUE(config.dataloader_drop_last);
  EXPECT_EQ(config.gradient_clipping, 0);
  EXPECT_FALSE(config.average_gradients);
  EXPECT_TRUE(config.wall_clock_breakdown && config.memory_breakdown && config.dump_state);
  EXPECT_EQ(config.tag_validation, TagValidation::kFail);
  EXPECT_EQ(Config::from_text(R"({"checkpoint": {"tag_validation": "ignore"}})").tag_validation,
            TagValidation::kIgnore);
}

TEST(Config, WritesWhatItReads) {
  for (const char* text : {
           "{}",
           kArticle,
           R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "steps_per_print": Infinity,
               "data_types": {"grad_accum_dtype": "bf16"}, "optimizer": {"type": "sgd", "params": {"momentum": 0.9}},
               "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1}},
               "pannier": {"device_memory": "1GiB", "unknown_keys": "warn"}})",
           R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "lr": "auto"}}, "steps_per_print": 10,
               "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
               "gradient_clipping": "auto", "gradient_accumulation_steps": "auto"})",
           R"({"optimizer": {"type": "Lion"}, "scheduler": {"type": "LRRangeTest"}})",
           R"({"optimizer": {"type": "Adagrad"}, "scheduler": {"type": "WarmupDecayLR", "params": {
               "warmup_max_lr": 0.1, "total_num_steps": 6, "warmup_type": "linear"}}})",
       }) {
    const std::string once = Config::from_text(text).to_json();
    EXPECT_EQ(Config::from_text(once).to_json(), once);
  }
}

TEST(Config, WritesDefaultsAndAutos) {
  const std::string json = Config::from_text(R"({"gradient_clipping": "auto", "train_batch_size": "auto"})").to_json();
  EXPECT_THAT(json, AllOf(HasSubstr("\"gradient_clipping\": \"auto\""), HasSubstr("\"train_batch_size\": \"auto\""),
                          HasSubstr("\"reduce_bucket_size\": 16777216"), Not(HasSubstr("optimizer\": {\n    \"type"))));
}

TEST_F(ConfigFile, ReadsAFile) {
  EXPECT_EQ(Config::from_file(write("ds.json", R"({"train_batch_size": 8})")).train_batch_size, 8);
}

TEST_F(ConfigFile, NamesThePathInEveryError) {
  const std::string unknown = write("unknown.json", R"({"fp61": {}})");
  EXPECT_EQ(error_of_call([&] { (void)Config::from_file(unknown); }),
            unknown + ": fp61: unknown key; did you mean fp16?");
  const std::string torn = write("torn.json", "{\n\"fp16\": {");
  EXPECT_THAT(error_of_call([&] { (void)Config::from_file(torn); }), StartsWith(torn + ":2:10: not JSON"));
  EXPECT_THAT(error_of_call([&] { (void)Config::from_file(write("empty.json", "")); }),
              HasSubstr("empty.json: not JSON: the text is empty"));
}

TEST_F(ConfigFile, NamesAPathThatCannotBeRead) {
  const auto refuse = [](const std::string& name, int error_number) {
    try {
      (void)Config::from_file(name);
      ADD_FAILURE() << name;
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), error_number);
      EXPECT_THAT(error.what(), HasSubstr(name));
    }
  };
  refuse(path("missing.json"), ENOENT);
  refuse(path(""), EISDIR);
  refuse(write("file", "{}") + "/below", ENOTDIR);
}

TEST_F(ConfigFile, RefusesAFileThatIsNoConfiguration) {
  const std::string weights = write("model.bin", "");
  std::filesystem::resize_file(weights, std::uintmax_t{17} << 20);
  EXPECT_THAT(error_of_call([&] { (void)Config::from_file(weights); }), HasSubstr("too large for a configuration"));
}

}  // namespace
}  // namespace pannier
