package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// NotPipelineError is a split of a model whose family can't be split.
type NotPipelineError struct {
	Family string
	Stages int
}

func (e *NotPipelineError) Error() string {
	return fmt.Sprintf("%s is not a supported pipeline family: there is no stage executor for it, so it can't be split over %d stages: leave --pp-size and --pp-layers out, and with mlxcel plan ask for one stage", e.Family, e.Stages)
}

// PlanOnlyError is a run of a model whose family is priced only.
type PlanOnlyError struct {
	Family string
	Plugin string // the executor that prices it
}

func (e *PlanOnlyError) Error() string {
	return fmt.Sprintf("the %s family is plan-only: %s prices its models for planning (mlxcel plan), and no installed executor runs them", e.Family, e.Plugin)
}

// checkSplit refuses what the family can't do over so many stages.
func checkSplit(family sdk.Family, stages int) error {
	if stages > 1 && !family.Pipeline {
		return &NotPipelineError{Family: family.Name, Stages: stages}
	}
	return nil
}

// checkRunnable refuses a family that is priced only.
func checkRunnable(choice executor.Choice, stages int) error {
	if err := checkSplit(choice.Family, stages); err != nil {
		return err
	}
	if choice.Family.PlanOnly {
		return &PlanOnlyError{Family: choice.Family.Name, Plugin: choice.Entry.Path}
	}
	return nil
}

// localMemory is what the stages on this machine share; it advises, and binds nothing. Nothing is known where the
// executor's device does not tell.
func localMemory(device sdk.Device, headroom partition.Headroom, stages int) partition.Memory {
	m := partition.Memory{Name: "local", Budget: partition.Unlimited, Advisory: true}
	if device.TotalMemory > 0 {
		m.Budget = max(1, headroom.Of(device.TotalMemory, stages))
	}
	return m
}

// planLocal cuts a model that is to run on this machine now. Its stages share one memory, so what they need together is
// the same for every cut: only weights that the device can never hold are refused. Less than that is a warning, since
// the context that a run comes to need is not known yet, and free memory is a matter of the moment.
func planLocal(pipeline partition.PipelineConfig, profile *sdk.ModelProfile, choice executor.Choice) (*partition.Plan, error) {
	if err := pipeline.Validate(profile); err != nil {
		return nil, err
	}
	stages, device := pipeline.Stages(), choice.Entry.Device
	r := partition.Request{
		Profile: profile, Quantizations: choice.Family.Quantizations,
		Hardware: partition.Local(stages, partition.Memory{Name: "this machine's memory", Budget: deviceLimit(device)}),
	}
	if _, err := pipeline.Plan(r); err != nil {
		return nil, err
	}
	r.Demand = partition.Demand{Context: partition.PlanningContext(profile), Sequences: 1}
	r.Hardware = partition.Local(stages, localMemory(device, partition.DefaultHeadroom(), stages))
	plan, err := pipeline.Plan(r)
	if err == nil {
		plan.Warnings = append(plan.Warnings, freeMemoryWarning(plan, device)...)
	}
	return plan, err
}

// deviceLimit is the most that a device can ever hold.
func deviceLimit(device sdk.Device) int64 {
	if device.TotalMemory > 0 {
		return device.TotalMemory
	}
	return partition.Unlimited
}

// freeMemoryWarning tells that a plan for this machine needs more than what is free on it now.
func freeMemoryWarning(plan *partition.Plan, device sdk.Device) []string {
	var weights int64
	for _, s := range plan.Stages {
		weights += s.Load.Weights
	}
	if device.TotalMemory <= 0 || weights <= device.FreeMemory {
		return nil
	}
	return []string{fmt.Sprintf("the weights take %s, but only %s of this machine's %s are free now: end other programs, or loading may be slow or fail",
		partition.FormatSize(weights), partition.FormatSize(device.FreeMemory), partition.FormatSize(device.TotalMemory))}
}

// StageMemoryError is a number of memories other than that of the stages.
type StageMemoryError struct {
	Sizes, Stages int
}

func (e *StageMemoryError) Error() string {
	return fmt.Sprintf("--stage-memory has %d of %d sizes: give one for each stage, or leave it out to plan for this machine", e.Sizes, e.Stages)
}

// PlanConfig is what a plan is asked for beyond the model and the pipeline flags.
type PlanConfig struct {
	Memory    []int64             // --stage-memory: bytes that each stage may use; nil takes this machine's, which all stages share
	Headroom  *partition.Headroom // --memory-headroom: left free; nil is the default on this machine and none on stated memory
	Context   int                 // --ctx: tokens of each sequence; 0 takes partition.PlanningContext
	Sequences int                 // --parallel: sequences at once; 0 means 1
}

// stages tells how many stages are planned for: as many as there are memories where nothing else says.
func (c PlanConfig) stages(p partition.PipelineConfig) int {
	if p.Size == nil && p.Layers == nil && c.Memory != nil {
		return len(c.Memory)
	}
	return p.Stages()
}

// validate returns the faults that can be told before the model is looked at.
func (c PlanConfig) validate(p partition.PipelineConfig) error {
	if err := p.Validate(nil); err != nil {
		return err
	}
	var faults []error
	if n := c.stages(p); c.Memory != nil && len(c.Memory) != n {
		faults = append(faults, &StageMemoryError{Sizes: len(c.Memory), Stages: n})
	}
	if c.Context < 0 {
		faults = append(faults, fmt.Errorf("--ctx %d: give 1 token or more", c.Context))
	}
	if c.Sequences < 0 {
		faults = append(faults, fmt.Errorf("--parallel %d: give 1 sequence or more", c.Sequences))
	}
	return errors.Join(faults...)
}

// hardware is what the plan is for.
func (c PlanConfig) hardware(device sdk.Device, stages int) partition.Hardware {
	if c.Memory == nil {
		headroom := partition.DefaultHeadroom()
		if c.Headroom != nil {
			headroom = *c.Headroom
		}
		return partition.Local(stages, localMemory(device, headroom, stages))
	}
	budgets := make([]int64, stages)
	for i, bytes := range c.Memory {
		budgets[i] = bytes
		if c.Headroom != nil {
			budgets[i] = c.Headroom.Of(bytes, 1)
		}
	}
	return partition.Separate(budgets)
}

// Planned is a plan that nothing was loaded for.
type Planned struct {
	Document *partition.Document
	Device   sdk.Device // this machine's, as the executor reports it
	Local    bool       // the plan is for this machine
}

// PlanModel prices a model folder, which may hold a config only, and cuts it.
func PlanModel(ctx context.Context, cfg Config, p PlanConfig) (out *Planned, err error) {
	cfg = cfg.withDefaults()
	if err := p.validate(cfg.Pipeline); err != nil {
		return nil, err
	}
	model, err := modelrepo.Open(cfg.Model)
	if err != nil {
		return nil, err
	}
	if model.WeightsErr != nil && !errors.Is(model.WeightsErr, safetensors.ErrNoWeights) {
		return nil, model.WeightsErr
	}
	err = withCatalog(ctx, cfg.Plugins, func(c *executor.Catalog, _ []executor.Entry) error {
		choice, err := c.ForModelType(model.ModelType)
		if err != nil {
			return err
		}
		if err := checkSplit(choice.Family, p.stages(cfg.Pipeline)); err != nil {
			return err
		}
		profile, err := inspect(ctx, c, choice, cfg)
		if err != nil {
			return err
		}
		out, err = p.plan(cfg, model, choice, profile)
		return err
	})
	return out, err
}

// plan makes the plan once everything is known.
func (c PlanConfig) plan(cfg Config, model *modelrepo.Model, choice executor.Choice, profile *sdk.ModelProfile) (*Planned, error) {
	pipeline, stages, device := cfg.Pipeline, c.stages(cfg.Pipeline), choice.Entry.Device
	if pipeline.Layers == nil {
		pipeline.Size = &stages
	}
	demand := partition.Demand{Context: c.Context, Sequences: max(1, c.Sequences)}
	if demand.Context == 0 {
		demand.Context = partition.PlanningContext(profile)
	}
	r := partition.Request{
		Profile: profile, Demand: demand, Hardware: c.hardware(device, stages),
		Quantizations: choice.Family.Quantizations,
	}
	r, err := pipeline.Request(r)
	if err != nil {
		return nil, err
	}
	plan, err := partition.New(r)
	if err != nil {
		return nil, err
	}
	fits, err := partition.WhatFits(r)
	if err != nil {
		return nil, err
	}
	out := &Planned{Document: partition.NewDocument(r, plan, fits), Device: device, Local: c.Memory == nil}
	out.Document.Model, out.Document.Family, out.Document.ModelType = model.Dir, choice.Family.Name, model.ModelType
	out.Document.PlanOnly = choice.Family.PlanOnly
	out.Document.Warnings = append(out.Document.Warnings, out.remarks()...)
	return out, nil
}

// remarks are what a reader should know of the plan beside what the planner itself warns of.
func (p *Planned) remarks() (list []string) {
	if p.Document.PlanOnly {
		list = append(list, fmt.Sprintf("the %s family is plan-only: no installed executor runs it", p.Document.Family))
	}
	if !p.Document.Profile.Exact {
		list = append(list, "the folder holds no weights: all sizes are estimated from config.json")
	}
	return list
}
