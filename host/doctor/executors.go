package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// executors tells which are used and why others are not, and how their devices are.
func (e *examination) executors(ctx context.Context) []Finding {
	found, err := e.probes.Executors(ctx)
	if err != nil {
		return []Finding{fail("executors", "see what the message names", "%v", err)}
	}
	var out []Finding
	used := 0
	for _, entry := range found.Entries {
		out = append(out, oneExecutor(entry))
		if entry.Used() {
			used++
		}
	}
	if used == 0 {
		none := fail("executors", "put one into a plugin folder, or name its folder with --plugin-dir", "none to run a model with in %s", strings.Join(found.Folders, ", "))
		if e.cfg.Coordinator {
			none.Level = Warning // its peers have them
		}
		out = append(out, none)
	}
	return append(out, devices(found.Entries)...)
}

func oneExecutor(e executor.Entry) Finding {
	name := "executor " + filepath.Base(e.Path)
	if e.Problem == nil {
		text := fmt.Sprintf("starts and answers: version %s, %s", e.Version, families(e.Families))
		for _, s := range e.Shadowed {
			text += fmt.Sprintf("; not used for %s, which %s serves", s.Family, s.By)
		}
		return ok(name, "%s", text)
	}
	remedy := executorRemedy(e.Problem)
	f := fail(name, remedy, "not used: %s", apart(e.Problem.Error(), remedy))
	if _, twice := errors.AsType[*executor.DuplicateError](e.Problem); twice {
		f.Level = Warning
	}
	return f
}

func families(list []sdk.Family) string {
	names := make([]string, len(list))
	for i, f := range list {
		names[i] = f.Name
		if f.PlanOnly {
			names[i] += " (plan only)"
		}
	}
	return strings.Join(names, ", ")
}

// executorRemedy tells what to do about an executor that is not used. Where the error's text says it as well, it says it in the
// same words.
func executorRemedy(err error) string {
	if e, is := errors.AsType[*executor.NotExecutableError](err); is {
		return "run chmod +x " + e.Path
	}
	if e, is := errors.AsType[*executor.UntrustedError](err); is {
		return e.Fix
	}
	if e, is := errors.AsType[*executor.ChecksumError](err); is {
		if e.State == executor.ChecksumMissing {
			return "put its SHA-256 into " + e.File
		}
		return "install the binary again, or write its new checksum if you changed it yourself"
	}
	if e, is := errors.AsType[*executor.ContractError](err); is {
		if e.Got > e.Want {
			return "update mlxcel"
		}
		return "update the executor"
	}
	if _, is := errors.AsType[*executor.StartTimeoutError](err); is {
		return "see what it waits for, or remove it from the plugin folder"
	}
	if _, is := errors.AsType[*executor.NotPluginError](err); is {
		return "remove it from the plugin folder, or build it with the sdk's Serve"
	}
	if _, is := errors.AsType[*executor.DuplicateError](err); is {
		return "change the order of --plugin-dir to prefer it"
	}
	return "install it again, or remove it from the plugin folder"
}

// lowMemory is the part of a device's memory below which little is free.
const lowMemory = 10

// devices tells of each device that executors compute on, once.
func devices(entries []executor.Entry) []Finding {
	type device struct{ runtime, kind, name string }
	seen := map[device]bool{}
	runtimes := map[string]bool{}
	var out []Finding
	for _, e := range entries {
		d := device{e.Runtime, e.Device.Kind, e.Device.Name}
		if !e.Used() || seen[d] {
			continue
		}
		seen[d], runtimes[e.Runtime] = true, true
		out = append(out, deviceHealth(e.Runtime, e.Device))
	}
	if len(runtimes) > 1 {
		out = append(out, warn("device", "install executors of one release", "the executors are built with %d versions of the tensor library, so their results may differ", len(runtimes)))
	}
	return out
}

func deviceHealth(runtime string, d sdk.Device) Finding {
	const name = "device"
	text := fmt.Sprintf("%s on %s", runtime, d.Kind)
	if d.Name != "" {
		text += " (" + d.Name + ")"
	}
	if d.TotalMemory <= 0 {
		return warn(name, "give the stage's memory with --stage-memory", "%s: it does not say how much memory it has", text)
	}
	text += fmt.Sprintf(": %s memory, %s free", partition.FormatSize(d.TotalMemory), partition.FormatSize(d.FreeMemory))
	if d.FreeMemory < d.TotalMemory/lowMemory {
		return warn(name, "end programs that use it", "%s: little is left for a model", text)
	}
	return ok(name, "%s", text)
}

// model checks the folder as a run would.
func (e *examination) model(ctx context.Context) []Finding {
	const name = "model"
	found, err := e.probes.Inspect(ctx)
	if found == nil && err == nil {
		err = errors.New("no answer")
	}
	var out []Finding
	if found != nil {
		for _, c := range found.Checks {
			out = append(out, modelCheck(c))
		}
	}
	unknown, isUnknown := errors.AsType[*executor.UnknownModelError](err)
	switch {
	case isUnknown:
		remedy := fmt.Sprintf("put an executor for it into one of %s, or name its folder with --plugin-dir", strings.Join(unknown.Folders, ", "))
		what, _, _ := strings.Cut(unknown.Error(), "; ")
		f := fail(name, remedy, "%s: %s", e.cfg.Model, what)
		if e.cfg.Coordinator {
			f.Level = Warning
		}
		return append(out, f)
	case err != nil:
		return append(out, fail(name, "copy or download the folder again, or correct --model", "%s: %v", e.cfg.Model, err))
	}
	return append([]Finding{modelSummary(e.cfg.Model, found)}, out...)
}

func modelSummary(dir string, found *engine.Inspection) Finding {
	text := fmt.Sprintf("%s: family %s, executor %s", dir, found.Family.Name, filepath.Base(found.Plugin))
	if p := found.Profile; p != nil {
		total := p.Embedding + p.Head - p.TiedBytes
		for _, l := range p.Layers {
			total += l.Weights
		}
		text += fmt.Sprintf(", %d layers, %s", len(p.Layers), partition.FormatSize(total))
	}
	return ok("model", "%s", text)
}

func modelCheck(c engine.Check) Finding {
	name := "model " + c.Name
	if c.Err == nil {
		return ok(name, "%s", c.Text)
	}
	return fail(name, "copy or download that file again", "%v", c.Err)
}
