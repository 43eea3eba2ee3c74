package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/urfave/cli/v2"
)

func planCommand() *cli.Command {
	flags := []cli.Flag{
		modelFlag(),
		&cli.IntFlag{Name: "stages", Category: groupPipeline, Usage: "cut the model into `N` stages (default: as many as there are sizes or ranges, else 1)"},
		&cli.StringFlag{Name: "stage-memory", Category: groupPipeline, Usage: "what each stage may use, `SIZES` such as \"16GiB,64GiB\" (default: this machine's memory, which all stages share)"},
		&cli.StringFlag{Name: "memory-headroom", Category: groupPipeline, Usage: "leave a part of each memory, a `SIZE` for each stage, or both free, e.g. \"5%+1GiB\" (default: " + headroomText() + " on this machine, nothing of stated memory)"},
		&cli.IntFlag{Name: "ctx", Category: groupPipeline, Usage: fmt.Sprintf("context of each sequence in `TOKENS` (default: %d, or the model's where that is less)", partition.DefaultContext)},
		&cli.IntFlag{Name: "parallel", Category: groupPipeline, Value: 1, Usage: "`SEQUENCES` at once"},
		&cli.StringFlag{Name: "pp-layers", Category: groupPipeline, Usage: "inclusive layer `RANGES`, one per stage, e.g. \"0-14,15-29\" (default: the most even cut that fits)"},
		dtypeFlag(),
		&cli.BoolFlag{Name: "json", Category: groupScripts, Usage: "print one JSON object instead of a table"},
	}
	return &cli.Command{
		Name:        "plan",
		Usage:       "show how a model would be split, what each stage holds, and what fits",
		Description: "Nothing is loaded, and a folder with only a config.json will do.",
		Flags:       append(append(flags, objectiveFlags()...), pluginFlags()...),
		Action:      runPlan,
	}
}

func headroomText() string {
	h := partition.DefaultHeadroom()
	return fmt.Sprintf("%v%%+%s", h.Percent, strings.ReplaceAll(size(h.Fixed), " ", ""))
}

func runPlan(c *cli.Context) error {
	if c.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; the model goes with --model", c.Args().First())
	}
	cfg := engineConfig(c)
	if err := setModel(c, &cfg); err != nil {
		return err
	}
	plan, err := readPlan(c, &cfg)
	if err != nil {
		return err
	}
	planned, err := engine.PlanModel(c.Context, cfg, plan)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, planned.Document)
	}
	return printPlan(c.App.Writer, planned)
}

// readPlan reads the flags of what is planned for.
func readPlan(c *cli.Context, cfg *engine.Config) (plan engine.PlanConfig, err error) {
	if c.IsSet("stages") {
		n := c.Int("stages")
		cfg.Pipeline.Size, cfg.Pipeline.SizeFlag = &n, "--stages"
	}
	if c.IsSet("pp-layers") {
		s := c.String("pp-layers")
		cfg.Pipeline.Layers = &s
	}
	for _, flag := range []string{"ctx", "parallel"} {
		if n := c.Int(flag); c.IsSet(flag) && n < 1 {
			return plan, fmt.Errorf("--%s %d: give 1 or more", flag, n)
		}
	}
	plan.Context, plan.Sequences = c.Int("ctx"), c.Int("parallel")
	if c.IsSet("stage-memory") {
		if plan.Memory, err = partition.ParseStageMemory(c.String("stage-memory")); err != nil {
			return plan, err
		}
	}
	if c.IsSet("memory-headroom") {
		h, err := partition.ParseHeadroom(c.String("memory-headroom"))
		if err != nil {
			return plan, err
		}
		plan.Headroom = &h
	}
	return plan, setObjective(c, cfg)
}

func printPlan(w io.Writer, p *engine.Planned) error {
	d := p.Document
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-14s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("model", "%s", d.Model)
	source := "sizes from the weights' headers"
	if !d.Profile.Exact {
		source = "sizes estimated from config.json"
	}
	line("family", "%s (model_type %s), %d layers, %s, %s", d.Family, d.ModelType, len(d.Profile.Layers), quantizationText(d), source)
	line("planned for", "%d tokens of context, %d at once, objective %s", d.Context, d.Sequences, d.Objective)
	fmt.Fprintln(w)
	if err := printStages(w, d); err != nil {
		return err
	}
	fmt.Fprintln(w)
	line("imbalance", "%.2fx", d.Imbalance)
	if p.Local {
		line("this machine", "%s memory, %s free now; all stages share it", size(p.Device.TotalMemory), size(p.Device.FreeMemory))
	}
	line("what fits", "%s", d.FitsText())
	for _, warning := range d.Warnings {
		line("warning", "%s", warning)
	}
	return nil
}

func quantizationText(d *partition.Document) string {
	if d.Profile.Quantization == "none" {
		return "not quantized"
	}
	return d.Profile.Quantization
}

func printStages(w io.Writer, d *partition.Document) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "stage\tlayers\tweights\tKV cache\tstate\tload\tbudget\t  fit")
	for _, s := range d.Stages {
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t  %s\n", s.Stage, s.Layers, size(s.Weights), size(s.KV), size(s.State), size(s.Load), budgetText(s.Budget), bar(s.Load, s.Budget))
	}
	for _, sum := range sharedMemories(d) {
		fmt.Fprintf(table, "%s\t\t\t\t\t%s\t%s\t  %s\n", sum.name, size(sum.load), budgetText(sum.budget), bar(sum.load, sum.budget))
	}
	return table.Flush()
}

// memorySum is what the stages on one memory need together.
type memorySum struct {
	name   string
	load   int64
	budget *int64
}

// sharedMemories sums the stages of each memory that has more than one.
func sharedMemories(d *partition.Document) (list []memorySum) {
	count := map[string]int{}
	for _, s := range d.Stages {
		count[s.Memory]++
	}
	at := map[string]int{}
	for _, s := range d.Stages {
		if count[s.Memory] < 2 {
			continue
		}
		if _, ok := at[s.Memory]; !ok {
			at[s.Memory] = len(list)
			list = append(list, memorySum{name: s.Memory, budget: s.Budget})
		}
		list[at[s.Memory]].load += s.Load
	}
	return list
}

func budgetText(budget *int64) string {
	if budget == nil {
		return "unknown"
	}
	return size(*budget)
}

const barWidth = 20

// bar draws how much of a budget is used. It is full at the budget and no later.
func bar(load int64, budget *int64) string {
	if budget == nil {
		return ""
	}
	part := float64(load) / float64(*budget)
	filled := int(min(part, 1) * barWidth)
	if load > 0 {
		filled = max(filled, 1)
	}
	text := fmt.Sprintf("[%s%s] %3.0f%%", strings.Repeat("#", filled), strings.Repeat("-", barWidth-filled), math.Ceil(100*part))
	if load > *budget {
		text += " does not fit"
	}
	return text
}
