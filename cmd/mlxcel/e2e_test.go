package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// These tests run the program as a user does: the built binary with the built executors and the real model.
const (
	root    = "../.."
	tiny    = root + "/testdata/parity/llama-tied-q4"
	smolLM2 = root + "/models/smollm2-135m-instruct"
)

func binary(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs(root + "/bin/mlxcel")
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("%v; run make build", err)
	}
	return path
}

// mlxcel runs the program and returns stdout, stderr and the exit code.
func mlxcel(t testing.TB, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary(t), args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return out.String(), errs.String(), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), 0
}

func answerOf(t testing.TB, args ...string) answer {
	t.Helper()
	out, errs, code := mlxcel(t, "", append([]string{"generate", "--json"}, args...)...)
	if code != 0 {
		t.Fatalf("mlxcel %v: exit code %d: %s", args, code, errs)
	}
	var a answer
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		t.Fatalf("mlxcel %v printed %q: %v", args, out, err)
	}
	return a
}

// golden is a trimmed golden_f32.json.
type golden struct {
	Runs []struct {
		Prompt []int32 `json:"prompt_ids"`
		Tokens []int32 `json:"tokens"`
	} `json:"runs"`
}

func ids(list []int32) string {
	text := make([]string, len(list))
	for i, id := range list {
		text[i] = fmt.Sprint(id)
	}
	return strings.Join(text, ",")
}

func TestGoldenTokens(t *testing.T) {
	var g golden
	raw, err := os.ReadFile(tiny + "/golden_f32.json")
	if err == nil {
		err = json.Unmarshal(raw, &g)
	}
	if err != nil {
		t.Fatal(err)
	}
	run := g.Runs[0]
	for _, pipeline := range [][]string{nil, {"--pp-size", "2"}, {"--pp-layers", "0-0,1-1,2-2,3-3,4-4,5-5", "--prefill-chunk-size", "7"}} {
		args := append([]string{"-m", tiny, "--prompt-ids", ids(run.Prompt), "-n", fmt.Sprint(len(run.Tokens)), "--ignore-eos", "--dtype", "float32"}, pipeline...)
		a := answerOf(t, args...)
		if !slices.Equal(a.TokenIDs, run.Tokens) || !slices.Equal(a.PromptTokenIDs, run.Prompt) || a.FinishReason != "length" {
			t.Errorf("%v: tokens %v (%s), golden %v", pipeline, a.TokenIDs, a.FinishReason, run.Tokens)
		}
	}
}

func TestJSONDescribesTheRun(t *testing.T) {
	a := answerOf(t, "-m", smolLM2, "-p", "What is the capital of France?", "--pp-layers", "0-9,10-29", "--logprobs", "3")
	if a.Text != "The capital of France is Paris." || a.FinishReason != "stop" {
		t.Errorf("text %q, finish reason %q", a.Text, a.FinishReason)
	}
	if last := a.TokenIDs[len(a.TokenIDs)-1]; last != 2 {
		t.Errorf("token ids end with %d, want the EOS 2", last)
	}
	s := a.Plan.Stages
	if len(s) != 2 || s[0].Layers != "0-9" || s[0].Start != 0 || s[0].End != 10 || s[1].Layers != "10-29" || s[1].Plugin != "llama" || s[0].Bytes <= 0 {
		t.Errorf("plan %+v", s)
	}
	if len(a.Logprobs) != len(a.TokenIDs) || len(a.Logprobs[0].Top) != 3 || a.Logprobs[0].Top[0].Token != a.TokenIDs[0] {
		t.Errorf("logprobs %+v", a.Logprobs)
	}
	if a.Timings.Load <= 0 || a.Timings.FirstToken <= 0 || a.Timings.Prompt <= 0 || a.Timings.Decode <= 0 {
		t.Errorf("timings %+v", a.Timings)
	}
}

func TestStreamsTextAndFooter(t *testing.T) {
	out, errs, code := mlxcel(t, "", "generate", "-m", smolLM2, "-p", "What is the capital of France?", "--stop", " Paris", "--verbose")
	if code != 0 || out != "The capital of France is\n" {
		t.Errorf("exit code %d, text %q", code, out)
	}
	for _, want := range []string{"-- prompt 37 tokens", "generated 6 tokens", "stages 1", "pipeline partition quality: 1 stages"} {
		if !strings.Contains(errs, want) {
			t.Errorf("stderr lacks %q: %s", want, errs)
		}
	}
}

func TestSeedDecidesTheText(t *testing.T) {
	base := []string{"-m", smolLM2, "-p", "Tell me a story.", "-n", "12", "--temp", "1.2", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01", "--seed"}
	one := answerOf(t, append(base, "7")...)
	split := answerOf(t, append(base, "7", "--pp-size", "3", "--threads", "1")...)
	other := answerOf(t, append(base, "8")...)
	if one.Text != split.Text {
		t.Errorf("the same seed gives %q alone and %q split", one.Text, split.Text)
	}
	if one.Text == other.Text {
		t.Errorf("two seeds both give %q", one.Text)
	}
}

func TestScoreIDs(t *testing.T) {
	free := answerOf(t, "-m", tiny, "--prompt-ids", "312,51,259", "-n", "3", "--ignore-eos", "--logprobs", "5")
	forced := []int32{free.TokenIDs[0], 9, 9}
	a := answerOf(t, "-m", tiny, "--prompt-ids", "312,51,259", "--score-ids", ids(forced), "--pp-size", "2")
	if !slices.Equal(a.TokenIDs, forced) || len(a.Logprobs) != 3 {
		t.Fatalf("token ids %v with %d steps, want %v", a.TokenIDs, len(a.Logprobs), forced)
	}
	for step := range 2 { // the second step still follows the model's own first token
		if !slices.Equal(a.Logprobs[step].Top, free.Logprobs[step].Top) {
			t.Errorf("step %d: %+v, unforced %+v", step, a.Logprobs[step].Top, free.Logprobs[step].Top)
		}
	}
}

func TestChat(t *testing.T) {
	out, errs, code := mlxcel(t, "What is the capital of France?\n\n/clear\nWhat is the capital of France?\n/exit\nnever read\n", "chat", "-m", smolLM2, "--pp-size", "2")
	if want := "The capital of France is Paris.\nThe capital of France is Paris.\n"; code != 0 || out != want {
		t.Errorf("exit code %d, text %q, want %q: %s", code, out, want, errs)
	}
}

func TestInspectAndPlugins(t *testing.T) {
	out, _, code := mlxcel(t, "", "inspect", "-m", smolLM2)
	for _, want := range []string{"llama", "layers         30", "tied to the embedding", "23040 bytes per token", "8192 tokens", "49152 tokens"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("inspect (exit code %d) lacks %q: %s", code, want, out)
		}
	}
	out, _, code = mlxcel(t, "", "plugins", "--json")
	if code != 0 || !strings.Contains(out, `"families":["llama","mistral",`) {
		t.Errorf("plugins (exit code %d): %s", code, out)
	}
}

// copyModel links the files of a model folder into a new one, where a test may change them.
func copyModel(t *testing.T, from string, change map[string]func([]byte) []byte) string {
	t.Helper()
	dir := t.TempDir()
	entries, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
	}
	for name := range change {
		names[name] = true
	}
	for name := range names {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if f := change[name]; f != nil {
			data = f(data)
		}
		if data == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func replace(old, with string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(old), []byte(with)) }
}

func TestBadInput(t *testing.T) {
	const shard2 = "model-00002-of-00003.safetensors"
	sharded := root + "/testdata/parity/llama-tied-q8"
	change := func(from, file string, f func([]byte) []byte) string {
		return copyModel(t, from, map[string]func([]byte) []byte{file: f})
	}
	remove := func([]byte) []byte { return nil }
	cut := func(b []byte) []byte { return b[:len(b)-1] }
	run := func(args ...string) []string { return append([]string{"generate", "-m", tiny, "-p", "hi"}, args...) }
	model := func(dir string) []string { return []string{"generate", "-m", dir, "-p", "hi"} }
	for name, tc := range map[string]struct {
		args []string
		want []string // parts of the message
	}{
		"no model":                 {[]string{"generate", "-p", "hi"}, []string{"--model"}},
		"no such folder":           {model("/nonexistent/model"), []string{"/nonexistent/model", "no such model folder"}},
		"no config":                {model(t.TempDir()), []string{"no config.json"}},
		"unknown model_type":       {model(change(tiny, "config.json", replace(`"model_type": "llama"`, `"model_type": "mystery"`))), []string{`"mystery"`, "llama", "mistral", "plugins/llama"}},
		"config is broken":         {model(change(tiny, "config.json", cut)), []string{"config.json"}},
		"missing shard":            {model(change(sharded, shard2, remove)), []string{shard2, "missing shard"}},
		"truncated shard":          {model(change(sharded, shard2, cut)), []string{shard2, "truncated"}},
		"extra shard":              {model(change(sharded, "model-extra.safetensors", func([]byte) []byte { return []byte("x") })), []string{"model-extra.safetensors", "extra shard"}},
		"shape disagrees":          {model(change(tiny, "config.json", replace(`"intermediate_size": 192`, `"intermediate_size": 256`))), []string{"model.safetensors", "mlp"}},
		"activation not built":     {model(change(tiny, "config.json", replace(`"silu"`, `"gelu"`))), []string{"hidden_act", "gelu"}},
		"tokenizer missing":        {model(change(tiny, "tokenizer.json", remove)), []string{"tokenizer.json"}},
		"layers with a gap":        {run("--pp-layers", "0-1,3-5"), []string{"--pp-layers", "2"}},
		"layers overlap":           {run("--pp-layers", "0-3,3-5"), []string{"--pp-layers", "3"}},
		"layers reversed":          {run("--pp-layers", "0-2,5-3"), []string{"--pp-layers", "5-3"}},
		"layers out of range":      {run("--pp-layers", "0-2,3-9"), []string{"--pp-layers", "9"}},
		"layers blank":             {run("--pp-layers", ""), []string{"--pp-layers"}},
		"layers no numbers":        {run("--pp-layers", "a-b"), []string{"--pp-layers", "a-b"}},
		"size 0":                   {run("--pp-size", "0"), []string{"--pp-size"}},
		"size 1 with layers":       {run("--pp-size", "1", "--pp-layers", "0-2,3-5"), []string{"--pp-size", "--pp-layers"}},
		"more stages than layers":  {run("--pp-size", "7"), []string{"--pp-size", "7", "6"}},
		"size and layers differ":   {run("--pp-size", "3", "--pp-layers", "0-2,3-5"), []string{"--pp-size", "--pp-layers"}},
		"micro-batch 0":            {run("--pp-micro-batch-size", "0"), []string{"--pp-micro-batch-size"}},
		"prompt too long":          {[]string{"generate", "-m", tiny, "-p", strings.Repeat("word ", 4000)}, []string{"4096", "1"}},
		"invalid UTF-8":            {[]string{"generate", "-m", tiny, "-p", "a\xffb"}, []string{"UTF-8", "1"}},
		"ids outside":              {[]string{"generate", "-m", tiny, "--prompt-ids", "312,320"}, []string{"320", "319"}},
		"ids no numbers":           {[]string{"generate", "-m", tiny, "--prompt-ids", "1,x"}, []string{"--prompt-ids", `"x"`}},
		"prompt given twice":       {run("--prompt-ids", "1"), []string{"--prompt", "--prompt-ids"}},
		"unknown dtype":            {run("--dtype", "int8"), []string{"--dtype", "int8"}},
		"unknown flag":             {run("--pp-sise", "2"), []string{"pp-sise", "--help"}},
		"stray argument":           {run("stray"), []string{"stray"}},
		"bad sampling":             {run("--top-p", "1.5", "--min-p", "2", "--temp", "-1"), []string{"--top-p", "--min-p", "--temp"}},
		"max tokens 0":             {run("-n", "0"), []string{"--max-tokens"}},
		"chunk below 0":            {run("--prefill-chunk-size", "-1"), []string{"--prefill-chunk-size"}},
		"gguf as a model":          {model(change(t.TempDir(), "m.gguf", func([]byte) []byte { return []byte("GGUF") }) + "/m.gguf"), []string{"mlxcel import"}},
		"import of something else": {[]string{"import", tiny + "/config.json", t.TempDir() + "/out"}, []string{"not a GGUF"}},
		"no plugin at all":         {append(model(tiny), "--plugin-require-checksum"), []string{"llama", ".sha256"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := mlxcel(t, "", tc.args...)
			if code != 1 || out != "" {
				t.Errorf("exit code %d, stdout %q, want 1 and nothing", code, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(errs, want) {
					t.Errorf("the message lacks %q: %s", want, errs)
				}
			}
		})
	}
}

// TestNothingIsLeft: no run leaves a file behind, whether it succeeds or fails.
func TestNothingIsLeft(t *testing.T) {
	tmp := t.TempDir()
	for _, args := range [][]string{
		{"generate", "-m", tiny, "--prompt-ids", "312,51", "-n", "4", "--ignore-eos", "--pp-size", "3"},
		{"generate", "-m", tiny, "--prompt-ids", "312,51", "--pp-size", "9"},
		{"inspect", "-m", tiny}, {"plugins"},
	} {
		cmd := exec.CommandContext(t.Context(), binary(t), args...)
		cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
		_ = cmd.Run() // one of them fails, as it should
		var left []string
		_ = filepath.WalkDir(tmp, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				left = append(left, path)
			}
			return nil
		})
		if len(left) > 0 {
			t.Errorf("mlxcel %v left %v", args, left)
		}
	}
}
