//! Further rounds of a step: groups that taught nothing are replaced ([`crate::decide::refill`]).

use super::{Observer, Run, RunError};
use crate::decide::curriculum::plan_refill;
use crate::event::{BatchPlanned, BatchRefilled};

impl Run {
    /// Draws and samples groups in place of those that taught nothing, until none is lacking or the rounds are used
    /// up. Every round is recorded before it is sampled: a resumed run goes on with the same groups.
    pub(super) fn refill(&mut self, plan: &BatchPlanned, observer: &mut dyn Observer) -> Result<(), RunError> {
        for round in 1..=self.settings.batch.refill {
            let Some(groups) = self.refill_groups(plan, round)? else { break };
            self.sample(plan, &groups, observer)?;
        }
        Ok(())
    }

    /// The groups of a further round, as recorded or else drawn and recorded; `None` where none is needed.
    fn refill_groups(&mut self, plan: &BatchPlanned, round: u32) -> Result<Option<Vec<(String, u32)>>, RunError> {
        let bad = |e| RunError::internal("a recorded step", e);
        let state = self.ledger.state();
        let Some(open) = state.recorded.steps.get(&plan.step) else { return Ok(None) };
        if round <= open.rounds() {
            let recorded = open.refills().map_err(bad)?.into_iter().find(|refill| refill.round == round);
            return Ok(recorded.map(|refill| refill.groups));
        }
        let lacking = open.lacking().map_err(bad)?;
        // Once signals are raised the rollouts are complete.
        if open.closed || lacking == 0 {
            return Ok(None);
        }
        let (planned, candidates) = (open.groups().map_err(bad)?, state.tasks.candidates());
        let (at, seed) = ((plan.step, round), self.settings.run.seed);
        let groups = plan_refill(&candidates, at, &planned, seed, &self.batch_options(lacking));
        if groups.is_empty() {
            return Ok(None);
        }
        self.ledger.record(BatchRefilled { step: plan.step, round, groups: groups.clone() }, 0)?;
        Ok(Some(groups))
    }
}
