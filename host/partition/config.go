package partition

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/mlxcel/mlxcel/sdk"
)

// PipelineConfig is what the pipeline flags say. A nil field is a flag that was not given.
type PipelineConfig struct {
	Size           *int      // --pp-size: stages. Not given: as many as Layers has ranges, else 1, which means no split
	SizeFlag       string    // the name under which Size was asked for; default "--pp-size"
	Layers         *string   // --pp-layers: inclusive layer ranges, one per stage; alone it turns the pipeline on
	MicroBatchSize *int      // --pp-micro-batch-size: sequences per micro-batch. Not given: 1
	Objective      Objective // --pp-objective: what an automatic cut makes small; empty takes the Request's
	Speeds         []float64 // --stage-speed: relative speed of each stage for ObjectiveSpeed; nil takes the Request's
}

// MicroBatch returns the sequences per micro-batch.
func (c PipelineConfig) MicroBatch() int {
	if c.MicroBatchSize == nil {
		return 1
	}
	return *c.MicroBatchSize
}

func (c PipelineConfig) sizeFlag() string {
	if c.SizeFlag == "" {
		return "--pp-size"
	}
	return c.SizeFlag
}

// Validate returns all faults at once, joined. Without a profile (nil) it finds those that need no model, so that
// bad flags are told before anything is started.
func (c PipelineConfig) Validate(profile *sdk.ModelProfile) error {
	var faults []error
	var ranges []sdk.LayerRange
	if c.Layers != nil {
		var err error
		if ranges, err = ParseRanges(*c.Layers); err != nil {
			faults = append(faults, err)
		} else if profile != nil {
			faults = append(faults, checkRanges(profile, ranges)...)
		}
	}
	faults = append(faults, c.checkSize(profile, ranges)...)
	if c.MicroBatchSize != nil && *c.MicroBatchSize < 1 {
		faults = append(faults, flagFault("--pp-micro-batch-size", *c.MicroBatchSize, "a micro-batch needs at least 1 sequence"))
	}
	return errors.Join(faults...)
}

// checkSize looks at the stage count by itself, against the ranges (nil when absent or unreadable) and against the model.
func (c PipelineConfig) checkSize(profile *sdk.ModelProfile, ranges []sdk.LayerRange) (faults []error) {
	if c.Size == nil {
		return nil
	}
	size, flag := *c.Size, c.sizeFlag()
	fault := func(format string, args ...any) []error {
		return []error{flagFault(flag, size, fmt.Sprintf(format, args...))}
	}
	switch {
	case size < 1:
		return fault("a pipeline needs at least 1 stage: use 2 or more to split the model, or leave the flag out")
	case size == 1 && c.Layers != nil:
		return fault("1 turns the pipeline off, but --pp-layers asks for one: leave %s out, or give the number of ranges", flag)
	case ranges != nil && size != len(ranges):
		return fault("--pp-layers %q has %d ranges: make the two equal, or leave %s out", *c.Layers, len(ranges), flag)
	}
	if profile == nil || c.Layers != nil {
		return nil
	}
	if most := mostStages(profile); size > most {
		return []error{&TooManyStagesError{Flag: flag, Stages: size, Most: most, Layers: len(profile.Layers)}}
	}
	return nil
}

// Stages returns how many stages the flags ask for. They are valid.
func (c PipelineConfig) Stages() int {
	switch {
	case c.Layers != nil:
		ranges, _ := ParseRanges(*c.Layers)
		return len(ranges)
	case c.Size != nil:
		return *c.Size
	}
	return 1
}

// Request validates the flags against the request's model, and completes it by what they say. A request without hardware
// gets one machine without limits.
func (c PipelineConfig) Request(r Request) (Request, error) {
	if err := c.Validate(r.Profile); err != nil {
		return r, err
	}
	if c.Layers != nil {
		var err error
		if r.Ranges, err = ParseRanges(*c.Layers); err != nil {
			return r, err
		}
	}
	if c.Objective != "" {
		r.Objective = c.Objective
	}
	if c.Speeds != nil {
		r.Speeds = c.Speeds
	}
	if r.Hardware.Stages == nil {
		r.Hardware = Local(c.Stages(), Memory{Budget: Unlimited})
	}
	return r, nil
}

// Plan makes a plan of the completed request.
func (c PipelineConfig) Plan(r Request) (*Plan, error) {
	r, err := c.Request(r)
	if err != nil {
		return nil, err
	}
	return New(r)
}

func flagFault(flag string, value int, reason string) error {
	return &FlagError{Flag: flag, Value: strconv.Itoa(value), Reason: reason}
}
