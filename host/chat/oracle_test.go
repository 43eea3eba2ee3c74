package chat_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/chat"
)

// oracleVar names the folder that scripts/oracle/chat/run.sh prints.
const oracleVar = "MLXCEL_CHAT_ORACLE"

type oracle struct {
	Now       time.Time         `json:"now"`
	Specials  map[string]string `json:"specials"`
	Scenarios []oracleScenario  `json:"scenarios"`
}

type oracleScenario struct {
	Name                string                     `json:"name"`
	Messages            []chat.Message             `json:"messages"`
	Tools               json.RawMessage            `json:"tools"`
	Documents           json.RawMessage            `json:"documents"`
	AddGenerationPrompt bool                       `json:"add_generation_prompt"`
	Extra               map[string]json.RawMessage `json:"extra"`
}

type oracleTemplate struct {
	Name     string `json:"name"`
	Source   string `json:"source"`
	Outcomes []struct {
		Text    *string `json:"text"`
		Refused *string `json:"refused"`
		Error   *string `json:"error"`
	} `json:"outcomes"`
}

// TestOracle renders real templates and compares with what the Python original
// made of them: the same text, and a refusal wherever the template refuses, in
// the same words. Where Python itself meets an error anything goes.
func TestOracle(t *testing.T) {
	dir := os.Getenv(oracleVar)
	if dir == "" {
		t.Skipf("set %s to the folder that scripts/oracle/chat/run.sh prints", oracleVar)
	}
	head, templates := readOracle(t, dir)
	var texts, equal, refusals, refused, perfect int
	seen := map[string]bool{}
	for _, o := range templates {
		seen[o.Name] = true
		template, err := chat.New(o.Source, head.Specials, chat.WithClock(func() time.Time { return head.Now }))
		wrong := 0
		first := ""
		for i, want := range o.Outcomes {
			if want.Error != nil {
				continue
			}
			s := head.Scenarios[i]
			got := ""
			renderErr := err
			if renderErr == nil {
				got, renderErr = template.Render(chat.Options{
					Messages: s.Messages, Tools: s.Tools, Documents: s.Documents,
					AddGenerationPrompt: s.AddGenerationPrompt, Extra: s.Extra,
				})
			}
			var problem string
			if want.Text != nil {
				texts++
				if problem = differText(got, renderErr, *want.Text); problem == "" {
					equal++
				}
			} else {
				refusals++
				if problem = differRefusal(renderErr, *want.Refused); problem == "" {
					refused++
				}
			}
			if problem != "" {
				wrong++
				if first == "" {
					first = s.Name + ": " + problem
				}
			}
		}
		known, isKnown := oracleDifferences[o.Name]
		switch {
		case wrong == 0:
			perfect++
			if isKnown {
				t.Errorf("%s: no longer differs; take it off the list", o.Name)
			}
		case !isKnown || known.renders != wrong:
			t.Errorf("%s: %d renders differ (known: %d), first %s", o.Name, wrong, known.renders, first)
		}
	}
	for _, name := range oracleTargets {
		if _, known := oracleDifferences[name]; known || !seen[name] {
			t.Errorf("%s must be there and not on the list of differences", name)
		}
	}
	t.Logf("templates perfect %d of %d; texts equal %d of %d; refusals %d of %d", perfect, len(templates), equal, texts, refused, refusals)
}

func differText(got string, err error, want string) string {
	if err != nil {
		return "error: " + err.Error()
	}
	if got == want {
		return ""
	}
	at := 0
	for at < len(got) && at < len(want) && got[at] == want[at] {
		at++
	}
	from := max(0, at-60)
	return "got …" + got[from:min(len(got), at+60)] + "… want …" + want[from:min(len(want), at+60)] + "…"
}

func differRefusal(err error, want string) string {
	var refused *chat.RefusedError
	if !errors.As(err, &refused) {
		return "wanted a refusal, got " + errorText(err)
	}
	if refused.Message != want {
		return "refused with " + refused.Message + ", want " + want
	}
	return ""
}

func errorText(err error) string {
	if err == nil {
		return "a text"
	}
	return err.Error()
}

func readOracle(t *testing.T, dir string) (oracle, []oracleTemplate) {
	t.Helper()
	var head oracle
	raw, err := os.ReadFile(filepath.Join(dir, "scenarios.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "goldens.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var templates []oracleTemplate
	lines := bufio.NewReader(z)
	d := json.NewDecoder(lines)
	for d.More() {
		var o oracleTemplate
		if err := d.Decode(&o); err != nil {
			t.Fatal(err)
		}
		if len(o.Outcomes) != len(head.Scenarios) {
			t.Fatalf("%s: %d outcomes for %d scenarios", o.Name, len(o.Outcomes), len(head.Scenarios))
		}
		templates = append(templates, o)
	}
	if len(templates) == 0 || !strings.Contains(templates[0].Source, "{") {
		t.Fatalf("no templates in %s", dir)
	}
	return head, templates
}

// oracleDifference is how many renders of a template are known to differ from
// Python's, and why.
type oracleDifference struct {
	renders int
	cause   string
}

// oracleDifferences are all the templates that differ.
var oracleDifferences = map[string]oracleDifference{
	"SvalTek-Q3-CharThink-9B-temp":        {26, "text added to the result of the safe filter is HTML-escaped by Python"},
	"meetkai-functionary-medium-v3.1":     {31, "text added to the result of the safe filter is HTML-escaped by Python"},
	"ai-sage-GigaChat3.1-Audio-10B-A1.8B": {31, "calls dict.from_keys, which in Python happens to be a generic alias of dict"},
}

// oracleTargets are the templates of the families that mlxcel serves, which must
// all be there and must not differ.
var oracleTargets = []string{
	"HuggingFaceTB-SmolLM2-135M-Instruct",
	"meta-llama-Llama-3.1-8B-Instruct",
	"meta-llama-Llama-3.2-3B-Instruct",
	"trl-internal-testing-tiny-Llama4ForCausalLM",
	"mistralai-Mistral-7B-Instruct-v0.2", // and Mixtral
	"mistralai-Mistral-7B-Instruct-v0.3", // and Mixtral
	"Mistral-Small-3.2-24B-Instruct-2506",
	"Qwen-Qwen3-0.6B",
	"Qwen-Qwen3-4B-Instruct-2507", // and Qwen3-Next
	"Qwen-Qwen3-Coder-Next",
	"Qwen3.5-4B",
	"unsloth-gemma-3-270m-it",
	"google-gemma-4-31B-it",
	"google-gemma-4-E4B-it",
	"trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528",
	"deepseek-ai-DeepSeek-V3.1",
	"deepseek-ai-DeepSeek-V3.2",
	"deepseek-ai-DeepSeek-V4",
	"zai-org-GLM-4-9B-0414",
	"unsloth-GLM-4.5-Air",
	"zai-org-GLM-4.5-Air",
	"GLM-4.6",
	"GLM-4.7-Flash",
	"zai-org-GLM-5",
	"openai-gpt-oss-120b",
	"ai21labs-AI21-Jamba2-3B",
	"ai21labs-Jamba-tiny-dev",
	"moonshotai-Kimi-K2-Instruct",
	"nvidia-Nemotron-H-8B-Base-8K",
	"nvidia-NVIDIA-Nemotron-Nano-12B-v2",
	"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}
