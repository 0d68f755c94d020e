//! Mutating policies.

use coracle_cel::{Program, Shared, Value as Cel};
use serde_json::Value;

use crate::environment::{Input, ResultType, evaluate};
use crate::validating::{compile, read_variables};
use crate::{BUDGET, Conditions};

/// A compiled `spec` of a MutatingAdmissionPolicy.
#[derive(Debug)]
pub struct MutatingPolicy {
    /// Whether an error denies the request: `failurePolicy: Fail`.
    pub fails: bool,
    /// Whether the policy runs again when a later plugin has changed the object: `reinvocationPolicy: IfNeeded`.
    pub again: bool,
    conditions: Conditions,
    shared: Shared,
    /// The error of the first variable that does not compile.
    variable_error: Option<String>,
    mutations: Vec<Mutation>,
}

#[derive(Debug)]
struct Mutation {
    expression: (String, Result<Program, String>),
    expected: ResultType,
}

/// A change of an object.
#[derive(Clone, Debug, PartialEq)]
pub enum Patch {
    /// Fields to merge by the rules of server-side apply.
    Apply(Value),
    /// A JSON patch.
    Json(Value),
}

impl MutatingPolicy {
    /// Compiles a `spec`. An expression that does not compile fails when it is evaluated.
    pub fn read(spec: &Value) -> MutatingPolicy {
        let has_params = spec["paramKind"].is_object();
        let (expressions, variable_error) = read_variables(spec, has_params);
        let mutations = spec["mutations"].as_array().into_iter().flatten().map(|mutation| {
            let (field, expected) = match mutation["patchType"].as_str() {
                Some("JSONPatch") => ("jsonPatch", ResultType::JsonPatch),
                _ => ("applyConfiguration", ResultType::ApplyConfiguration),
            };
            Mutation { expression: compile(&expressions, &mutation[field]["expression"], expected), expected }
        });
        let mutations = mutations.collect();
        MutatingPolicy {
            fails: spec["failurePolicy"] != "Ignore",
            again: spec["reinvocationPolicy"] == "IfNeeded",
            conditions: Conditions::read(&spec["matchConditions"], has_params),
            shared: expressions.into_shared(),
            variable_error,
            mutations,
        }
    }

    /// Whether the match conditions are true.
    ///
    /// # Errors
    /// A condition failed, or the policy does not compile.
    pub fn matches(&self, input: &Input<'_>) -> Result<bool, String> {
        match &self.variable_error {
            Some(variable_error) => Err(variable_error.clone()),
            None => self.conditions.matches(input),
        }
    }

    /// Number of mutations.
    pub fn len(&self) -> usize {
        self.mutations.len()
    }

    /// Whether there is no mutation.
    pub fn is_empty(&self) -> bool {
        self.mutations.is_empty()
    }

    /// Evaluates a mutation.
    ///
    /// # Errors
    /// The expression failed, or its result is not a patch.
    pub fn patch(&self, index: usize, input: &Input<'_>) -> Result<Patch, String> {
        let Some(Mutation { expression: (source, program), expected }) = self.mutations.get(index) else {
            return Err(format!("there is no mutation {index}"));
        };
        let session = input.session(&self.shared);
        let result = evaluate(&session, input.cost, source, program, &mut BUDGET.clone())?;
        // The size is checked before the value is traversed for other checks.
        let json = result
            .to_limited_json()
            .ok_or_else(|| format!("expression '{source}' resulted in a too large or too deep patch"))?;
        match (expected, &result) {
            (ResultType::JsonPatch, Cel::List(operations)) => {
                let made =
                    |value: &Cel<'_>| matches!(value, Cel::Structure(made) if made.name() == "JSONPatch");
                if !operations.iter().all(made) {
                    return Err(format!("expression '{source}' did not evaluate to a list of JSONPatch"));
                }
                Ok(Patch::Json(json))
            }
            (ResultType::ApplyConfiguration, Cel::Structure(made)) if made.name() == "Object" => {
                made.check_names()?;
                Ok(Patch::Apply(json))
            }
            _ => Err(format!("expression '{source}' did not evaluate to a patch")),
        }
    }
}
