package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

var clusterPrompts = []string{"The quick brown fox", "Numbers: 0 1 2 3 42 1234567. ¿Qué tal? 你好", "x"}

// A cluster answers what one process answers, to the last bit of every log-probability.
func TestClusterTokens(t *testing.T) {
	for _, model := range []string{smolLM2, tiny, root + "/testdata/parity/mistral-base-q4"} {
		t.Run(filepath.Base(model), func(t *testing.T) {
			alone := server(t, "-m", absolute(t, model))
			var want []string
			for _, p := range clusterPrompts {
				want = append(want, alone.choices(p))
			}
			for _, stages := range []int{2, 3} {
				t.Run(fmt.Sprintf("%d stages", stages), func(t *testing.T) {
					onNetworks(t, stages, func(t *testing.T, n *hosts.Network) {
						c := newCluster(t, n, model)
						r := c.bringUp()
						for i, p := range clusterPrompts {
							if got := r.choices(p); got != want[i] {
								t.Errorf("%q:\n%s\none process:\n%s", p, got, want[i])
							}
						}
						c.stop()
					})
				})
			}
		})
	}
}

// One checkpoint of every family runs over two hosts, and gives the tokens of the reference. A new family joins by its folder.
func TestClusterRunsEveryFamily(t *testing.T) {
	folders, err := filepath.Glob(root + "/testdata/parity/*/golden_f32.json")
	if err != nil || len(folders) == 0 {
		t.Fatal("no checkpoints", err)
	}
	tried := map[string]bool{}
	for _, golden := range folders {
		folder := filepath.Dir(golden)
		family, _, _ := strings.Cut(filepath.Base(folder), "-")
		if tried[family] {
			continue
		}
		tried[family] = true
		t.Run(family, func(t *testing.T) { familyOverTwoHosts(t, family, folder) })
	}
}

// onlyPlanned are families without a stage executor: a cluster refuses them.
var onlyPlanned = []string{"kimi_k3"}

func familyOverTwoHosts(t *testing.T, family, folder string) {
	prompt, want := goldenRun(t, folder)
	c := newCluster(t, hosts.Loopback(t, clusterHosts(2)...), folder)
	c.startPeers("--dtype", "float32")
	p := c.net.Host(coordinatorHost).Start(t, hosts.Command{Path: binary(t, "mlxcel"), Args: []string{
		"generate", "-m", c.model, "--distributed-config", c.topology(), "--node-id", "coordinator", "--cluster-secret-file", c.secret,
		"--dtype", "float32", "--prompt-ids", prompt, "-n", fmt.Sprint(len(want)), "--ignore-eos", "--json"}})
	code := p.Exit(t)
	if slices.Contains(onlyPlanned, family) {
		p.Await(t, hosts.Says("pipeline capability mismatch"))
		if code == 0 {
			t.Error("it runs a family that only can be planned")
		}
	} else if got := generatedTokens(t, p); code != 0 || !slices.Equal(got, want) {
		t.Errorf("exit code %d, tokens\n%v, the reference has\n%v", code, got, want)
	}
	c.coordinator = nil
	c.stop()
}

// goldenRun is the first prompt of a checkpoint's reference, as --prompt-ids takes it, and the reference's tokens.
func goldenRun(t *testing.T, folder string) (prompt string, tokens []int) {
	t.Helper()
	var golden struct {
		Runs []struct {
			Prompt []int `json:"prompt_ids"`
			Tokens []int
		}
	}
	raw, err := os.ReadFile(filepath.Join(folder, "golden_f32.json"))
	if err == nil {
		err = json.Unmarshal(raw, &golden)
	}
	if err != nil || len(golden.Runs) == 0 {
		t.Fatal("no reference", err)
	}
	run := golden.Runs[0]
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(run.Prompt), " ", ","), "[]"), run.Tokens
}

// generatedTokens are what generate --json printed.
func generatedTokens(t *testing.T, p *hosts.Process) []int {
	t.Helper()
	var text strings.Builder
	for _, e := range p.Events() {
		if e.Stdout {
			text.WriteString(e.Line)
		}
	}
	var answer struct {
		Tokens []int `json:"token_ids"`
	}
	if err := json.Unmarshal([]byte(text.String()), &answer); err != nil {
		t.Errorf("%s printed %q: %v", p, text.String(), err)
	}
	return answer.Tokens
}
