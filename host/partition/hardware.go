package partition

import (
	"errors"
	"fmt"
	"math"
)

// Unlimited is the budget of a memory of which nothing is known.
const Unlimited = math.MaxInt64

// Memory is what the stages on one device share.
type Memory struct {
	Name     string
	Budget   int64 // bytes that all stages on it may hold together; Unlimited sets no limit
	Advisory bool  // a plan that does not fit is made all the same, and warned of
}

// limited tells whether there is a budget to keep. One past all machines is none.
func (m Memory) limited() bool { return m.Budget < tooMuch }
func (m Memory) binding() bool { return m.limited() && !m.Advisory }

// Place is where one stage runs.
type Place struct {
	DeviceID string // the node in the cluster configuration, "local-stage-<n>" on one machine
	Memory   int    // index in Hardware.Memories
}

// Hardware is what a plan is made for: the stages' places, in order, and the memories that they share.
type Hardware struct {
	Memories []Memory
	Stages   []Place
}

// Local puts all stages on one machine, whose memory they share.
func Local(stages int, memory Memory) Hardware {
	h := Hardware{Memories: []Memory{memory}}
	for i := range stages {
		h.Stages = append(h.Stages, Place{DeviceID: fmt.Sprintf("local-stage-%d", i)})
	}
	return h
}

// Separate gives each stage a device of its own, with the given budget in bytes.
func Separate(budgets []int64) Hardware {
	var h Hardware
	for i, b := range budgets {
		name := fmt.Sprintf("stage-%d", i)
		h.Memories = append(h.Memories, Memory{Name: name, Budget: b})
		h.Stages = append(h.Stages, Place{DeviceID: name, Memory: i})
	}
	return h
}

func (h Hardware) validate() error {
	var faults []error
	for _, m := range h.Memories {
		if m.Budget <= 0 {
			faults = append(faults, &BudgetError{Memory: m.Name, Bytes: m.Budget})
		}
	}
	for s, p := range h.Stages {
		if p.Memory < 0 || p.Memory >= len(h.Memories) {
			faults = append(faults, fmt.Errorf("stage %d is on memory %d of %d", s, p.Memory, len(h.Memories)))
		}
	}
	return errors.Join(faults...)
}

// budget is what the memory of stage s may hold.
func (h Hardware) budget(s int) int64 { return h.Memories[h.Stages[s].Memory].Budget }

// binding returns h with every limit in force.
func (h Hardware) binding() Hardware {
	memories := make([]Memory, len(h.Memories))
	for i, m := range h.Memories {
		m.Advisory = false
		memories[i] = m
	}
	return Hardware{memories, h.Stages}
}

// largest returns the largest budget of all stages.
func (h Hardware) largest() (budget int64) {
	for s := range h.Stages {
		budget = max(budget, h.budget(s))
	}
	return budget
}

// grown returns h with n more stages at its end, each on a device of its own with the given budget.
func (h Hardware) grown(n int, budget int64) Hardware {
	out := Hardware{append([]Memory{}, h.Memories...), append([]Place{}, h.Stages...)}
	for range n {
		name := fmt.Sprintf("stage-%d", len(out.Stages))
		out.Stages = append(out.Stages, Place{DeviceID: name, Memory: len(out.Memories)})
		out.Memories = append(out.Memories, Memory{Name: name, Budget: budget})
	}
	return out
}
