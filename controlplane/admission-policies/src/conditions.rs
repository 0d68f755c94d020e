//! Match conditions of policies and webhooks.

use coracle_cel::{Program, Shared, Value as Cel};
use serde_json::Value;

use crate::environment::{Expressions, Input, ResultType, evaluate};

/// Maximum number of match conditions.
pub const MAX_CONDITIONS: usize = 64;

/// Maximum cost of all match conditions of a policy or a webhook (`RuntimeCELCostBudgetMatchConstraints`).
const BUDGET: u64 = 2_500_000;

static NO_VARIABLES: std::sync::LazyLock<Shared> = std::sync::LazyLock::new(Shared::default);

/// Compiled match conditions.
#[derive(Debug, Default)]
pub struct Conditions(Vec<(String, Result<Program, String>)>);

impl Conditions {
    /// Compiles `matchConditions`.
    pub fn read(list: &Value, has_params: bool) -> Conditions {
        let list = list.as_array().map_or(&[][..], Vec::as_slice);
        if list.is_empty() {
            return Conditions::default();
        }
        let expressions = Expressions::new(has_params);
        let compiled = list.iter().take(MAX_CONDITIONS).map(|condition| {
            let source = condition["expression"].as_str().unwrap_or_default().trim();
            (source.to_owned(), expressions.compile(source, ResultType::Validation))
        });
        Conditions(compiled.collect())
    }

    /// Whether there is no condition.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all conditions are true. A false condition decides, even if another condition fails.
    ///
    /// # Errors
    /// A condition cannot be evaluated, and no other condition is false.
    pub fn matches(&self, input: &Input<'_>) -> Result<bool, String> {
        if self.is_empty() {
            return Ok(true);
        }
        let session = input.session(&NO_VARIABLES);
        let (mut budget, mut errors) = (BUDGET, Vec::new());
        for (source, program) in &self.0 {
            match evaluate(&session, input.cost, source, program, &mut budget) {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => return Ok(false),
                Ok(_) => errors.push(format!("expression '{source}' did not evaluate to a bool")),
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() { Ok(true) } else { Err(errors.join(", ")) }
    }
}
