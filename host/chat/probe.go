package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Limits of a template's trial. The engine has no fuel and no context: what it
// does cannot be stopped from within its process, and a stack that overflows
// cannot be recovered from.
const (
	probeTime   = 10 * time.Second
	probeGrace  = 5 * time.Second // for the child to say itself what went wrong
	probeMemory = 512 << 20       // bytes of Go memory, looked at every probeTick
	probeData   = 1 << 30         // bytes of RLIMIT_DATA, where the system enforces it
	probeStack  = 64 << 20        // bytes of one goroutine's stack; 1 GiB outside
	probeTick   = 10 * time.Millisecond
	probeOutput = 4 << 10 // bytes of the child's output that are kept
)

// parentVar tells the child which process waits for it: one that asks the system
// may already have been handed to another.
const parentVar = "MLXCEL_TRIAL_PARENT"

// report is what the child writes to its standard output when it ends by
// itself. A zero report says that the template passed.
type report struct {
	Compile string `json:"compile,omitempty"` // why it does not compile
	Unsafe  string `json:"unsafe,omitempty"`  // which limit it went past
}

// Probe tries a template in a process of its own: exe is the command that runs
// ProbeMain there, such as the running binary with a hidden subcommand. Nil
// means that the template compiled and that rendering some conversations ended,
// with a text or an error, within the limits. Otherwise the error is a
// *CompileError, an *UnsafeTemplateError, the context's own, or says why the
// command did not start. The child is gone when Probe returns.
func Probe(ctx context.Context, exe []string, source string) error {
	if len(exe) == 0 {
		return errors.New("chat template trial: no command given")
	}
	limited, cancel := context.WithTimeout(ctx, probeTime+probeGrace)
	defer cancel()
	stdout, stderr := head{left: probeOutput}, head{left: probeOutput}
	cmd := exec.CommandContext(limited, exe[0], exe[1:]...)
	cmd.Env = []string{"GOTRACEBACK=none", parentVar + "=" + strconv.Itoa(os.Getpid())} // and no secret of the host's
	cmd.Stdin = strings.NewReader(source)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("chat template trial: %w", err)
	}
	err := cmd.Wait()
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("chat template trial: %w", ctx.Err())
	case limited.Err() != nil:
		return &UnsafeTemplateError{Reason: "its trial did not end in time", Err: limited.Err()}
	}
	var r report
	if json.Unmarshal(stdout.kept, &r) != nil {
		return &UnsafeTemplateError{Reason: died(err, string(stderr.kept)), Err: err}
	}
	switch {
	case r.Compile != "":
		return &CompileError{Name: nameDefault, Err: errors.New(r.Compile)}
	case r.Unsafe != "":
		return &UnsafeTemplateError{Reason: r.Unsafe}
	case err != nil:
		return &UnsafeTemplateError{Reason: died(err, string(stderr.kept)), Err: err}
	}
	return nil
}

// Probe tries each of the model's templates, as the function of that name does.
func (t *Template) Probe(ctx context.Context, exe []string) error {
	for _, name := range t.Names() {
		if err := Probe(ctx, exe, t.sources[name]); err != nil {
			return fmt.Errorf("template %q: %w", name, err)
		}
	}
	return nil
}

// died words how a child ended that did not report: by what its runtime said
// last, or else by its state.
func died(err error, stderr string) string {
	for line := range strings.Lines(stderr) {
		if said, ok := strings.CutPrefix(line, "fatal error: "); ok {
			return "it killed its trial process: " + strings.TrimSpace(said)
		}
	}
	if err == nil {
		return "its trial process gave no report; is the command the right one?"
	}
	reason := "its trial process ended early: " + err.Error()
	if said := strings.TrimSpace(stderr); said != "" {
		reason += ": " + said
	}
	return reason
}

// head keeps the first bytes written to it.
type head struct {
	kept []byte
	left int
}

func (h *head) Write(p []byte) (int, error) {
	n := min(len(p), h.left)
	h.kept = append(h.kept, p[:n]...)
	h.left -= n
	return len(p), nil
}

// ProbeMain is all that the child of Probe does: it reads a template from
// stdin, renders conversations with it and reports to stdout. It sets limits
// for the whole process and may end it, so the caller does nothing but to exit
// with the code returned. The child also ends when its parent does.
func ProbeMain(stdin io.Reader, stdout io.Writer) int {
	debug.SetMaxStack(probeStack)
	if err := limitResources(); err != nil {
		fmt.Fprintf(os.Stderr, "chat template trial: limits: %v\n", err)
		return 1
	}
	source, err := io.ReadAll(io.LimitReader(stdin, maxSource+1))
	if err != nil {
		fmt.Fprintf(os.Stderr, "chat template trial: %v\n", err)
		return 1
	}
	done := make(chan report, 1)
	go func() { done <- try(string(source)) }()
	r := watch(done)
	if err := json.NewEncoder(stdout).Encode(r); err != nil {
		fmt.Fprintf(os.Stderr, "chat template trial: %v\n", err)
		return 1
	}
	return 0
}

// limitResources sets the limits that the system keeps: no core file, and no
// more memory than a good template needs by far.
func limitResources() error {
	for resource, limit := range map[int]uint64{syscall.RLIMIT_CORE: 0, syscall.RLIMIT_DATA: probeData} {
		if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: limit, Max: limit}); err != nil {
			return err
		}
	}
	return nil
}

// watch waits for the trial's end, or for the first limit that it goes past. It
// leaves a trial that is still running behind: the process ends at once.
func watch(done <-chan report) report {
	tick := time.NewTicker(probeTick)
	defer tick.Stop()
	start, parent := time.Now(), os.Getenv(parentVar)
	for {
		select {
		case r := <-done:
			return r
		case now := <-tick.C:
			switch {
			case now.Sub(start) > probeTime:
				return report{Unsafe: fmt.Sprintf("it still renders after %v", probeTime)}
			case goMemory() > probeMemory:
				return report{Unsafe: fmt.Sprintf("it takes more than %d MiB of memory", probeMemory>>20)}
			case parent != "" && parent != strconv.Itoa(os.Getppid()):
				return report{Unsafe: "nobody waits for the trial any more"}
			}
		}
	}
}

// goMemory is the bytes of memory that the Go runtime holds.
func goMemory() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64() - s[1].Value.Uint64()
}

// try renders the template with each of the trial's conversations. A render
// error is the template's right; going past a limit is not.
func try(source string) report {
	t, err := New(source, map[string]string{"bos_token": "<s>", "eos_token": "</s>"})
	if err != nil {
		var c *CompileError
		if errors.As(err, &c) {
			err = c.Err
		}
		return report{Compile: err.Error()}
	}
	for _, o := range probeConversations() {
		_, err := t.Render(o)
		var limit *LimitError
		if errors.As(err, &limit) {
			return report{Unsafe: limit.Error()}
		}
	}
	return report{}
}

// probeConversations are of the kinds that a server meets.
func probeConversations() []Options {
	tools := json.RawMessage(`[{"type":"function","function":{"name":"weather","description":"Weather in a city.","parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"array","items":{"type":"integer"}}},"required":["city"]}}}]`)
	system := Message{Role: "system", Content: Text("Be brief.")}
	user := Message{Role: "user", Content: Text("What is the weather?")}
	answer := Message{Role: "assistant", Content: Text("Fine."), ReasoningContent: "It is summer."}
	calls := Message{Role: "assistant", Content: NullContent(), ToolCalls: []ToolCall{{
		ID: "call12345", Type: "function",
		Function: FunctionCall{Name: "weather", Arguments: json.RawMessage(`{"city":"Oslo","days":[1,2]}`)},
	}}}
	result := Message{Role: "tool", Content: Text(`{"sky":"clear"}`), Name: "weather", ToolCallID: "call12345"}
	parts := Message{Role: "user", Content: Content{raw: json.RawMessage(`[{"type":"text","text":"Hello."}]`)}}
	on, off := json.RawMessage("true"), json.RawMessage("false")

	long := []Message{system}
	for range 50 {
		long = append(long, user, answer)
	}
	return []Options{
		{Messages: []Message{user}, AddGenerationPrompt: true},
		{Messages: []Message{system, user}, AddGenerationPrompt: true},
		{Messages: []Message{system, user, answer}},
		{Messages: []Message{parts}, AddGenerationPrompt: true},
		{Messages: []Message{system, user, calls, result}, Tools: tools, AddGenerationPrompt: true},
		{Messages: []Message{user, calls, result, answer, user}, Tools: tools, AddGenerationPrompt: true},
		{Messages: []Message{user, answer, user}, AddGenerationPrompt: true, Extra: map[string]json.RawMessage{"enable_thinking": on}},
		{Messages: []Message{user, answer, user}, AddGenerationPrompt: true, Extra: map[string]json.RawMessage{"enable_thinking": off}},
		{Messages: append(long, user), AddGenerationPrompt: true},
	}
}
