package pipeline

import "github.com/mlxcel/mlxcel/sdk"

// An order goes to every place, cut to what the place needs: token ids to the one with the embedding, and to the one that
// answers where the sampler counts tokens; what is wanted of the rows, masks and targets among it, to the one that answers;
// to others a sequence, a position and a number of rows.

// For returns what a place with that role needs of an order; counted tells of each sequence of a plan whether its sampler
// counts tokens, nil that none does. The order itself stays as it is.
func (o Order) For(role sdk.StageRole, counted []bool) Order {
	if o.Plan != nil {
		o.Plan = o.Plan.For(role, counted)
	}
	if r, ok := o.Op.(sdk.Reservation); ok {
		o.Op = reservationFor(r, role)
	}
	return o
}

// For returns what a place with that role needs of a plan. The plan itself stays as it is.
func (p *StepPlan) For(role sdk.StageRole, counted []bool) *StepPlan {
	if role.TakesTokens && role.Answers {
		return p
	}
	cut := &StepPlan{IDs: p.IDs, Cuts: p.Cuts, Seqs: make([]sdk.SeqStep, len(p.Seqs))}
	for i := range p.Seqs {
		s := p.Seqs[i]
		if !role.Answers {
			s.Want, s.TopN, s.Logprob, s.Targets, s.Allowed = sdk.WantNothing, 0, false, nil, nil
		}
		if counts := role.Answers && counted != nil && counted[i]; !role.TakesTokens && !counts {
			s.Tokens = nil
		}
		cut.Seqs[i] = s
	}
	return cut
}

// reservationFor returns what a place with that role needs of a reservation.
func reservationFor(r sdk.Reservation, role sdk.StageRole) sdk.Reservation {
	if !role.Answers || !r.Sampler.CountsTokens() {
		r.Prompt, r.Generated = nil, nil
	}
	if !role.Answers {
		r.Sampler = sdk.Sampler{}
	}
	return r
}
