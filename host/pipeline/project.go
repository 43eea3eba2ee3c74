package pipeline

import "github.com/mlxcel/mlxcel/sdk"

// For returns what a place with that role needs of a plan: what is wanted of the rows, and what that takes, is the
// business of the place that answers alone. The plan itself stays as it is.
func (p *StepPlan) For(role sdk.StageRole) *StepPlan {
	if role.Answers {
		return p
	}
	cut := &StepPlan{IDs: p.IDs, Cuts: p.Cuts, Seqs: make([]sdk.SeqStep, len(p.Seqs))}
	for i := range p.Seqs {
		s := &p.Seqs[i]
		cut.Seqs[i] = sdk.SeqStep{Seq: s.Seq, Pos: s.Pos, Tokens: s.Tokens, Prompt: s.Prompt, Want: sdk.WantNothing}
	}
	return cut
}

// reservationFor returns what a place with that role needs of a reservation: the sampler and the prompt, which penalties
// count, are the business of the place that answers alone.
func reservationFor(r sdk.Reservation, role sdk.StageRole) sdk.Reservation {
	if !role.Answers {
		r.Prompt, r.Sampler = nil, sdk.Sampler{}
	}
	return r
}

// For returns what a place with that role needs of an order.
func (o Order) For(role sdk.StageRole) Order {
	if o.Plan != nil {
		o.Plan = o.Plan.For(role)
	}
	if r, ok := o.Op.(sdk.Reservation); ok && !role.Answers {
		o.Op = reservationFor(r, role)
	}
	return o
}
