//! The cost of one evaluation, and its limit.

use crate::eval_error::{EvalError, Evaluated};
use crate::value::Value;

/// The cost so far, and the limit at which the evaluation ends.
pub(crate) struct CostMeter {
    cost: u64,
    limit: u64,
}

impl CostMeter {
    pub(crate) fn new(limit: u64) -> CostMeter {
        CostMeter { cost: 0, limit }
    }

    /// The cost so far.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// Adds to the cost.
    pub(crate) fn charge(&mut self, cost: u64) -> Result<(), EvalError> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > self.limit { Err(EvalError::CostLimit) } else { Ok(()) }
    }

    /// The cost that remains until the limit.
    pub(crate) fn left(&self) -> u64 {
        self.limit.saturating_sub(self.cost)
    }

    /// Charges for the copy of a value. Texts and bytes cost their length, because a copy takes memory.
    pub(crate) fn copied<'a>(&mut self, value: Value<'a>) -> Evaluated<'a> {
        self.charge(value.copy_cost())?;
        Ok(value)
    }

    /// The elements of a list. Charges for their number, and for the texts that are copied.
    pub(crate) fn items<'a>(&mut self, list: &Value<'a>) -> Result<Vec<Value<'a>>, EvalError> {
        self.charge(list.cost_size())?;
        let items = list.items().ok_or(EvalError::NoOverload)?;
        self.charge(items.iter().map(Value::copy_cost).fold(0, u64::saturating_add))?;
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::CostMeter;
    use crate::eval_error::EvalError;
    use crate::value::Value;

    #[test]
    fn charges_add_up_to_the_limit() {
        let mut meter = CostMeter::new(5);
        assert_eq!(meter.charge(5), Ok(()));
        assert_eq!((meter.cost(), meter.left()), (5, 0));
        assert_eq!(meter.charge(1), Err(EvalError::CostLimit));
        assert_eq!(CostMeter::new(u64::MAX - 1).charge(u64::MAX), Err(EvalError::CostLimit));
    }

    #[test]
    fn a_copied_text_costs_its_length() {
        let text = Value::text("0123456789".repeat(10));
        let mut meter = CostMeter::new(1_000);
        assert!(meter.copied(text.clone()).is_ok());
        assert_eq!(meter.cost(), text.copy_cost());
        assert!(CostMeter::new(0).copied(text).is_err());
    }
}
