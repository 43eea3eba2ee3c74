package cluster

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestFiles runs the files of testdata/toml. `load` reads the input as cluster.toml, and prints what is wrong with it or how it is written
// again.
func TestFiles(t *testing.T) {
	datadriven.Walk(t, "testdata/toml", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			file := filepath.Join(t.TempDir(), "cluster.toml")
			if err := os.WriteFile(file, []byte(d.Input), 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := Load(file)
			if err != nil {
				return strings.ReplaceAll(err.Error(), file, "cluster.toml") + "\n"
			}
			return strings.TrimPrefix(string(c.Render()), header+"\n")
		})
	})
}

func TestFaultsAreTyped(t *testing.T) {
	c, err := Parse([]byte("[cluster]\nname = 3\ncolour = \"red\"\n"), "x.toml")
	all, ok := errors.AsType[*ConfigError](err)
	if !ok || c == nil || len(all.Faults) != 3 {
		t.Fatalf("%v", err)
	}
	for i, key := range []string{"cluster.name", "cluster.colour", "nodes"} {
		if all.Faults[i].Key != key || all.Faults[i].File != "x.toml" {
			t.Errorf("fault %d: %+v, want key %s", i, all.Faults[i], key)
		}
	}
	if _, ok := errors.AsType[*Fault](err); !ok {
		t.Error("the faults are not reached through the error")
	}
	if c, err := Parse([]byte("[cluster"), "x.toml"); c != nil || !strings.Contains(err.Error(), "x.toml: (line 1, column") {
		t.Errorf("broken TOML: %v", err)
	}
	if _, err := Parse(make([]byte, maxFile+1), "x.toml"); err == nil {
		t.Error("a file without end is read")
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent.toml")); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), FlagConfig) {
		t.Errorf("absent file: %v", err)
	}
}

const twoStages = `
[cluster]
name = "pp"
pipeline_parallel_size = 2
secret_file = "keys/cluster.secret"
resources.memory_bytes = 1000

[[nodes]]
id = "stage-1"
address = "10.0.0.2:19001"
role = "pipeline_stage"
stage = 1
resources.memory_bytes = 3000

[[nodes]]
id = "stage-0"
address = "Studio-1.local:19001"
role = "pipeline_stage"
stage = 0
`

func mustParse(t testing.TB, text string) *Config {
	t.Helper()
	c, err := Parse([]byte(text), "/etc/mlxcel/cluster.toml")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConfigAnswers(t *testing.T) {
	c := mustParse(t, twoStages)
	stages := c.Stages()
	if len(stages) != 2 || stages[0].ID != "stage-0" || stages[1].ID != "stage-1" {
		t.Errorf("stages %+v", stages)
	}
	if a, b := c.Memory(stages[0]), c.Memory(stages[1]); a != 1000 || b != 3000 {
		t.Errorf("memory %d and %d, want the cluster's 1000 and the node's 3000", a, b)
	}
	if got := c.SecretPath(); got != "/etc/mlxcel/keys/cluster.secret" {
		t.Errorf("secret file %s", got)
	}
	if _, ok := c.Coordinator(); ok {
		t.Error("found a coordinator")
	}
	if _, err := c.WithCoordinator(""); err == nil || !strings.Contains(err.Error(), FlagControlAddr) {
		t.Errorf("no coordinator: %v", err)
	}
	full, err := c.WithCoordinator("10.0.0.1:19000")
	if err != nil {
		t.Fatal(err)
	}
	if n, ok := full.Coordinator(); !ok || n.Address != "10.0.0.1:19000" || len(c.Nodes) != 2 {
		t.Errorf("completed: %+v", full)
	}
	if again, err := full.WithCoordinator("1.1.1.1:1"); err != nil || again != full {
		t.Errorf("a complete topology is changed: %v", err)
	}
	if _, err := c.WithCoordinator("10.0.0.2:19001"); err == nil || !strings.Contains(err.Error(), "listens on a port of its own") {
		t.Errorf("coordinator at a stage's address: %v", err)
	}
}

func TestLocate(t *testing.T) {
	c := mustParse(t, twoStages)
	for _, tc := range []struct {
		name    string
		self    Self
		node    string
		notices int
		err     string
	}{
		{"by id", Self{ID: "stage-0"}, "stage-0", 0, ""},
		{"with its role and the others", Self{ID: "stage-1", Role: "pipeline_stage", Peers: []string{"studio-1.LOCAL:19001", " 10.0.0.2:19001"}}, "stage-1", 0, ""},
		{"with peers of another port", Self{ID: "stage-1", Peers: []string{"10.0.0.2:8080"}}, "stage-1", 1, ""},
		{"no id", Self{}, "", 0, "--distributed-config needs --node-id, one of stage-1, stage-0"},
		{"unknown id", Self{ID: "x"}, "", 0, "has no such node, only stage-1, stage-0"},
		{"other role", Self{ID: "stage-0", Role: "2d"}, "", 0, "gives node stage-0 the role pipeline_stage"},
		{"unknown role", Self{ID: "stage-0", Role: "boss"}, "", 0, `--node-role: "boss" is no role`},
		{"bad peer", Self{ID: "stage-0", Peers: []string{"10.0.0.2"}}, "", 0, "the port is missing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, notices, err := c.Locate(tc.self)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil || n.ID != tc.node || len(notices) != tc.notices {
				t.Errorf("node %s, notices %q, error %v", n.ID, notices, err)
			}
		})
	}
}

// Every alias reads as its role, in a file and in a flag, and what is not built is refused by name.
func TestRoles(t *testing.T) {
	for text, want := range map[string]Role{
		"hybrid": RoleHybrid, "pipeline_stage": RolePipelineStage, "pp_tp": RolePipelineTensorParallel, "2d": RolePipelineTensorParallel,
		"pipeline_tensor_parallel": RolePipelineTensorParallel, "prefill": RolePrefill, "decode": RoleDecode, "tensor_parallel": RoleTensorParallel,
	} {
		role, err := ParseRole(text)
		if err != nil || role != want {
			t.Errorf("%s: %s, %v", text, role, err)
		}
		built := want == RoleHybrid || want == RolePipelineStage
		err = role.Supported("--node-role")
		if _, refused := errors.AsType[*NotBuiltError](err); refused == built {
			t.Errorf("%s: %v", text, err)
		}
		if !built && (!strings.Contains(err.Error(), string(want)) || !strings.Contains(err.Error(), "not built yet")) {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, text := range []string{"", "Hybrid", "stage", "pipeline-stage"} {
		if role, err := ParseRole(text); err == nil {
			t.Errorf("%q is taken for %s", text, role)
		}
	}
}

func TestBackends(t *testing.T) {
	for _, tc := range []struct{ backend, goos, want string }{
		{"", "linux", ""},
		{"tcp", "darwin", ""},
		{"rdma", "linux", "rdma_transport: falling back to TCP (reason=os=linux, driver=not_built: this version has no rdma transport)"},
		{"rdma", "freebsd", "rdma_transport: falling back to TCP (reason=os=freebsd, driver=unsupported)"},
		{"thunderbolt", "darwin", "thunderbolt_transport: falling back to TCP (reason=os=darwin, driver=not_built: this version has no thunderbolt transport)"},
		{"thunderbolt", "linux", "thunderbolt_transport: falling back to TCP (reason=os=linux, driver=unsupported)"},
	} {
		b, err := ParseBackend(tc.backend)
		if got := b.Fallback(tc.goos); err != nil || got != tc.want {
			t.Errorf("%s on %s: %q, %v", tc.backend, tc.goos, got, err)
		}
	}
	if _, err := ParseBackend("carrier-pigeon"); err == nil || !strings.Contains(err.Error(), "tcp, thunderbolt, rdma") {
		t.Errorf("%v", err)
	}
}

func TestQuote(t *testing.T) {
	for _, s := range []string{"", "plain", `C:\keys "mine"`, "tab\tnewline\nreturn\r", "bell\a escape\x1b delete\x7f", "ünïcødé 日本 🐼", "\u2028\u200b"} {
		c := &Config{Name: "pp", PipelineParallel: 2, SecretFile: s}
		got, _ := Parse(c.Render(), "")
		if got == nil || got.SecretFile != s {
			t.Errorf("%q is written so that it reads as %+v:\n%s", s, got, c.Render())
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(twoStages))
	f.Add([]byte("[cluster]\nname = \"2d\"\npipeline_parallel_size = 2\ntensor_parallel_size = 2\n[[nodes]]\nid = \"a\"\naddress = \"[::1]:1\"\nrole = \"2d\"\nstage = 0\nrank = 1\n"))
	f.Add([]byte("nodes = [1, {id = \"a\"}]\ncluster = \"x\"\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := Parse(in, "cluster.toml")
		if err != nil {
			if err.Error() == "" {
				t.Fatal("an error without text")
			}
			return
		}
		out := c.Render()
		again, err := Parse(out, "cluster.toml")
		if err != nil {
			t.Fatalf("what is written is refused: %v\n%s", err, out)
		}
		if !bytes.Equal(again.Render(), out) {
			t.Fatalf("written twice, differs:\n%s\n%s", out, again.Render())
		}
		again.Nodes, c.Nodes = again.ordered(), c.ordered()
		c.Backend = c.backend()
		if !reflect.DeepEqual(again, c) {
			t.Fatalf("read %+v, written and read again %+v", c, again)
		}
	})
}
