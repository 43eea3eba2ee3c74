package executor

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// NotExecutableError is a program in a plugin folder that lacks the execute permission.
type NotExecutableError struct {
	Path string
}

func (e *NotExecutableError) Error() string {
	return fmt.Sprintf("%s is not executable: run chmod +x %s", e.Path, e.Path)
}

// UntrustedError is a file or folder that somebody else could have made or could change.
type UntrustedError struct {
	Path string
	Why  string
	Fix  string // the command or setting that cures it
}

func (e *UntrustedError) Error() string {
	return fmt.Sprintf("%s is not trusted: %s: %s", e.Path, e.Why, e.Fix)
}

// ChecksumError is a binary whose SHA-256 is not the one that stands beside it, or that has none though
// one is compulsory.
type ChecksumError struct {
	Path      string // the binary
	File      string // the checksum file
	State     ChecksumState
	Want, Got string // hex; empty when missing
}

func (e *ChecksumError) Error() string {
	if e.State == ChecksumMissing {
		return fmt.Sprintf("%s has no checksum, and --plugin-require-checksum is set: put its SHA-256 into %s", e.Path, e.File)
	}
	return fmt.Sprintf("%s has the wrong checksum: %s says sha256 %s, the binary has %s: install the binary again, or write its new checksum if you changed it yourself",
		e.Path, e.File, e.Want, e.Got)
}

// NotPluginError is a program that did not answer as an executor does.
type NotPluginError struct {
	Path      string
	Output    string   // what it printed instead of the handshake; may be empty
	LastLines []string // of its log
	Err       error    // why it could not be run at all, or what go-plugin said
}

func (e *NotPluginError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s is no executor plugin", e.Path)
	switch {
	case e.Output != "":
		fmt.Fprintf(&b, ": it printed %q instead of the handshake", e.Output)
	case e.Err != nil:
		fmt.Fprintf(&b, ": %v", e.Err)
	default:
		b.WriteString(": it ended, or closed its output, without the handshake")
	}
	b.WriteString(": remove it from the plugin folder, or build it with the sdk's Serve")
	writeLastLines(&b, e.LastLines)
	return b.String()
}

func (e *NotPluginError) Unwrap() error { return e.Err }

// StartTimeoutError is an executor that did not come up in time.
type StartTimeoutError struct {
	Path      string
	Timeout   time.Duration
	Phase     Phase
	LastLines []string
}

func (e *StartTimeoutError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s hung in %s: no answer within %v: see what it waits for, or remove it from the plugin folder", e.Path, e.Phase, e.Timeout)
	writeLastLines(&b, e.LastLines)
	return b.String()
}

// ContractError is an executor built for another version of the contract.
type ContractError struct {
	Path      string
	Want, Got int // the host's version, the executor's
}

func (e *ContractError) Error() string {
	older := "the executor"
	if e.Got > e.Want {
		older = "mlxcel"
	}
	return fmt.Sprintf("%s speaks contract version %d, this host speaks version %d: update %s", e.Path, e.Got, e.Want, older)
}

// Phase is what an executor was doing, for messages.
type Phase string

const (
	PhaseStart    Phase = "start"
	PhaseDescribe Phase = "describe"
	PhaseInspect  Phase = "inspect"
	PhaseImport   Phase = "import"
	PhaseLoad     Phase = "load"
	PhaseIdle     Phase = "idle"
	PhasePrefill  Phase = "prefill"
	PhaseDecode   Phase = "decode"
)

// DeathError is an executor process that ended without being asked to.
type DeathError struct {
	Stage     string // which stage it held; empty before it held one
	Plugin    string // the binary
	Phase     Phase
	PID       int
	ExitCode  int        // -1 when a signal ended it
	Signal    os.Signal  // nil when it exited by itself
	LastLines []string   // of its log, oldest first
	Stats     *sdk.Stats // the last that it told of itself; nil where it never did
	Err       error      // the call that failed with it, if one did
}

func (e *DeathError) Error() string {
	var b strings.Builder
	if e.Stage != "" {
		fmt.Fprintf(&b, "%s: ", e.Stage)
	}
	fmt.Fprintf(&b, "executor %s (pid %d) died in %s: ", e.Plugin, e.PID, e.Phase)
	switch {
	case e.Signal == syscall.SIGKILL:
		b.WriteString("killed by SIGKILL: if nobody did that, the system ran out of memory")
	case e.Signal != nil:
		fmt.Fprintf(&b, "signal %v", e.Signal)
	default:
		fmt.Fprintf(&b, "exit code %d", e.ExitCode)
	}
	if s := e.Stats; s != nil {
		fmt.Fprintf(&b, "; it last held %s resident: %s of weights, %s of state, %s of scratch, %s at its peak",
			mebibytes(s.ResidentBytes), mebibytes(s.WeightBytes), mebibytes(s.StateBytes), mebibytes(s.ScratchBytes), mebibytes(s.PeakBytes))
	}
	writeLastLines(&b, e.LastLines)
	return b.String()
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func (e *DeathError) Unwrap() error { return e.Err }

// DuplicateError is an executor all of whose families are already served by executors found before it.
type DuplicateError struct {
	Path     string
	Shadowed []Shadow
}

func (e *DuplicateError) Error() string {
	parts := make([]string, len(e.Shadowed))
	for i, s := range e.Shadowed {
		parts[i] = fmt.Sprintf("%s by %s", s.Family, s.By)
	}
	return fmt.Sprintf("%s is not needed: each of its families is served by an executor found earlier (%s): change the order of --plugin-dir to prefer it",
		e.Path, strings.Join(parts, ", "))
}

// InstalledFamily is a family and the executor that serves it.
type InstalledFamily struct {
	Family     string
	ModelTypes []string
	Imports    []string // containers, e.g. "gguf:llama"
	Plugin     string   // the binary
}

// UnknownModelError is a model that no installed executor runs.
type UnknownModelError struct {
	Kind      string // what was looked up: "model_type", "family" or "container"
	Name      string
	Installed []InstalledFamily
	Unused    []Entry  // executors found but not used
	Folders   []string // where executors are looked for
}

func (e *UnknownModelError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "no installed executor runs %s %q: ", e.Kind, e.Name)
	if len(e.Installed) == 0 {
		b.WriteString("none is installed")
	} else {
		b.WriteString("installed are ")
		for i, f := range e.Installed {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%s (by %s)", f.Family, f.Plugin)
		}
	}
	fmt.Fprintf(&b, "; put an executor for it into one of %s, or name its folder with --plugin-dir", strings.Join(e.Folders, ", "))
	for i := range e.Unused {
		fmt.Fprintf(&b, "\nnot used: %v", e.Unused[i].Problem)
	}
	return b.String()
}

// UnresponsiveError is an executor that runs but does not answer.
type UnresponsiveError struct {
	Stage  string
	Plugin string
	PID    int
	Phase  Phase
	Waited time.Duration
	Err    error
}

func (e *UnresponsiveError) Error() string {
	var b strings.Builder
	if e.Stage != "" {
		fmt.Fprintf(&b, "%s: ", e.Stage)
	}
	fmt.Fprintf(&b, "executor %s (pid %d) does not answer in %s: waited %v", e.Plugin, e.PID, e.Phase, e.Waited)
	return b.String()
}

func (e *UnresponsiveError) Unwrap() error { return e.Err }

// StuckError is an executor that outlived SIGKILL, as one in an uninterruptible system call does.
type StuckError struct {
	Plugin string
	PID    int
	Waited time.Duration
}

func (e *StuckError) Error() string {
	return fmt.Sprintf("executor %s (pid %d) still exists %v after SIGKILL: it waits in the kernel, look at its device or file system", e.Plugin, e.PID, e.Waited)
}

func writeLastLines(b *strings.Builder, lines []string) {
	if len(lines) == 0 {
		return
	}
	b.WriteString("; its last log lines:")
	for _, l := range lines {
		b.WriteString("\n  ")
		b.WriteString(l)
	}
}

// clip shortens text of unknown origin for a message.
func clip(s string) string {
	const most = 160
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}
