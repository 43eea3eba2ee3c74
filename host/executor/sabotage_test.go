package executor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk"
)

// The test binary is executor and host too. A plugin folder of a test holds links to it; the name of the link
// says what goes wrong.

// hostFlag in the environment turns the test binary into a host, see runHost.
const hostFlag = "MLXCEL_TEST_HOST"

func TestMain(m *testing.M) {
	switch {
	case sdk.Launched():
		serveSabotaged(filepath.Base(os.Args[0]))
	case os.Getenv(hostFlag) != "":
		runHost()
	default:
		os.Exit(m.Run())
	}
}

func serveSabotaged(mode string) {
	mode, _, _ = strings.Cut(mode, "@") // what follows only makes the name unique
	switch mode {
	case "dies-at-start":
		fmt.Fprintln(os.Stderr, "library not found")
		os.Exit(127)
	case "hangs-at-start":
		fmt.Fprintln(os.Stderr, "waiting for a device")
		if err := os.WriteFile(filepath.Join(os.TempDir(), "pid"), fmt.Append(nil, os.Getpid()), 0o600); err != nil {
			panic(err)
		}
		hang()
	case "next-contract":
		serveContract(sdk.ContractVersion + 1)
		return
	case "contract-1":
		serveContract(1)
		return
	case "noisy":
		makeNoise("before the handshake")
	case "ignores-sigterm":
		signal.Ignore(syscall.SIGTERM)
	}
	sdk.Serve(sdk.ServeOptions{New: func(log hclog.Logger) sdk.Executor { return &saboteur{mode: mode, log: log} }})
	if mode == "ignores-sigterm" {
		hang()
	}
}

// hang blocks for good; a bare select would be found out as a deadlock.
func hang() { time.Sleep(time.Hour) }

// serveContract is a correct executor of another contract, as far as a host gets that does not speak it.
func serveContract(version int) {
	handshake := sdk.Handshake()
	handshake.ProtocolVersion = uint(version)
	plugin.Serve(&plugin.ServeConfig{HandshakeConfig: handshake, Plugins: plugin.PluginSet{}, GRPCServer: plugin.DefaultGRPCServer})
}

// makeNoise prints where a C library would, past Go's os.Stdout.
func makeNoise(when string) {
	text := fmt.Sprintf("banner %s\n%s\n\x00\xff\n", when, strings.Repeat("long ", 100_000))
	for _, fd := range []int{1, 2} {
		for rest := []byte(text); len(rest) > 0; {
			n, err := syscall.Write(fd, rest)
			if err != nil && err != syscall.EINTR {
				panic(err)
			}
			rest = rest[max(n, 0):]
		}
	}
}

// saboteur serves the family named after its mode.
type saboteur struct {
	sdk.Executor // nil: whatever is not set below is not called
	mode         string
	log          hclog.Logger
	steps        uint64
}

func (s *saboteur) dieIf(mode string) {
	if s.mode != mode {
		return
	}
	s.log.Error("about to die", "mode", mode)
	if mode == "dies-in-decode" {
		panic("out of luck")
	}
	os.Exit(3)
}

func (s *saboteur) Describe(context.Context) (*sdk.Description, error) {
	s.dieIf("dies-in-describe")
	d := &sdk.Description{
		Name: s.mode, Version: "1.2.3", ContractVersion: sdk.ContractVersion, Runtime: "none",
		Devices:  []sdk.Device{{Kind: "cpu"}},
		Families: []sdk.Family{{Name: s.mode, ModelTypes: []string{s.mode, s.mode + "_text"}, Imports: []string{"gguf:" + s.mode}}},
	}
	switch s.mode {
	case "hangs-in-describe":
		hang()
	case "tells-environment":
		env, err := json.Marshal(os.Environ())
		d.Version = string(env)
		return d, err
	case "noisy":
		makeNoise("in describe")
		fmt.Println("through os.Stdout")
		s.log.Warn("through the logger", "answer", 42)
	case "lacks-much":
		d.Capabilities = []string{"from-the-future", sdk.CapabilityMasks}
	case "serves-nothing":
		d.Families = nil
	case "serves-two":
		d.Families = []sdk.Family{{Name: "good"}, {Name: "other"}}
	}
	return d, nil
}

func (s *saboteur) Load(_ context.Context, req sdk.LoadRequest, _ func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	s.dieIf("dies-in-load")
	return &sdk.LoadReport{Boundary: sdk.Boundary{Width: 4, Dtype: sdk.DtypeFloat32}, VocabSize: 8}, nil
}

func (s *saboteur) Reserve(context.Context, sdk.Reservation) error { return nil }

func (s *saboteur) Step(_ context.Context, step *sdk.Step) (*sdk.StepResult, error) {
	if step.Seqs[0].Prompt {
		s.dieIf("dies-in-prefill")
	} else {
		s.dieIf("dies-in-decode")
	}
	s.steps++
	r := &sdk.StepResult{ID: step.ID}
	for _, q := range step.Seqs {
		r.Seqs = append(r.Seqs, sdk.SeqResult{Seq: q.Seq, Token: 1})
	}
	return r, nil
}

func (s *saboteur) Unload(context.Context) error { return nil }

func (s *saboteur) Stats(context.Context) (*sdk.Stats, error) {
	return &sdk.Stats{Steps: s.steps, ResidentBytes: 3 << 20, StateBytes: 2 << 20}, nil
}
