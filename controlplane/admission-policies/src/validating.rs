//! Validating policies.

use coracle_cel::{Program, Shared, Value as Cel};
use serde_json::Value;

use crate::environment::{Expressions, Input, ResultType, evaluate};
use crate::{BUDGET, Conditions};

/// Maximum length of the result of a messageExpression in bytes.
const MAX_MESSAGE: usize = 5 * 1024;

/// Maximum length of the value of an audit annotation in bytes.
const MAX_ANNOTATION: usize = 10 * 1024;

type Compiled = (String, Result<Program, String>);

/// A compiled `spec` of a ValidatingAdmissionPolicy.
#[derive(Debug)]
pub struct ValidatingPolicy {
    /// Whether an error denies the request: `failurePolicy: Fail`.
    pub fails: bool,
    conditions: Conditions,
    shared: Shared,
    /// The error of the first variable that does not compile.
    variable_error: Option<String>,
    validations: Vec<Validation>,
    annotations: Vec<(String, Compiled)>,
}

#[derive(Debug)]
struct Validation {
    expression: Compiled,
    message: String,
    message_expression: Option<Compiled>,
    reason: String,
}

/// The result of a policy for one request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Failed validations, and errors if the failure policy is `Fail`.
    pub denials: Vec<Denial>,
    /// Errors of audit annotations: results of a wrong type and, if the failure policy is `Fail`, failed evaluations.
    /// They deny the request, even if the binding has no action `Deny`.
    pub broken_annotations: Vec<String>,
    /// Audit annotations.
    pub annotations: Vec<(String, String)>,
}

/// A failed validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Index in `validations`.
    pub index: usize,
    /// The message for the client.
    pub message: String,
    /// Reason of the Status.
    pub reason: String,
}

impl ValidatingPolicy {
    /// Compiles a `spec`. An expression that does not compile fails when it is evaluated.
    pub fn read(spec: &Value) -> ValidatingPolicy {
        let has_params = spec["paramKind"].is_object();
        let (expressions, variable_error) = read_variables(spec, has_params);
        let list = |field: &str| spec[field].as_array().map_or(&[][..], Vec::as_slice);
        let validations = list("validations").iter().map(|one| Validation::read(one, &expressions)).collect();
        let annotations = list("auditAnnotations")
            .iter()
            .map(|one| {
                let key = one["key"].as_str().unwrap_or_default().to_owned();
                (key, compile(&expressions, &one["valueExpression"], ResultType::Annotation))
            })
            .collect();
        ValidatingPolicy {
            fails: spec["failurePolicy"] != "Ignore",
            conditions: Conditions::read(&spec["matchConditions"], has_params),
            shared: expressions.into_shared(),
            variable_error,
            validations,
            annotations,
        }
    }

    /// Evaluates the policy.
    pub fn evaluate(&self, input: &Input<'_>) -> Outcome {
        let mut outcome = Outcome::default();
        let failed = |message: String| {
            let denial = Denial { index: 0, message, reason: "Invalid".to_owned() };
            if self.fails { vec![denial] } else { Vec::new() }
        };
        if let Some(variable_error) = &self.variable_error {
            outcome.denials = failed(variable_error.clone());
            return outcome;
        }
        match self.conditions.matches(input) {
            Ok(true) => {}
            Ok(false) => return outcome,
            Err(error) => {
                outcome.denials = failed(error);
                return outcome;
            }
        }
        self.validate(input, &mut outcome);
        self.annotate(input, &mut outcome);
        outcome
    }

    fn validate(&self, input: &Input<'_>, outcome: &mut Outcome) {
        let session = input.session(&self.shared);
        let mut budget = BUDGET;
        for (index, validation) in self.validations.iter().enumerate() {
            let (source, program) = &validation.expression;
            let (message, reason) = match evaluate(&session, input.cost, source, program, &mut budget) {
                Ok(Cel::Bool(true)) => continue,
                Ok(_) => {
                    let message = validation.message(|(source, program)| {
                        evaluate(&session, input.cost, source, program, &mut budget).ok()
                    });
                    (message, validation.reason.clone())
                }
                Err(_) if !self.fails => continue,
                Err(error) => (error, "Invalid".to_owned()),
            };
            outcome.denials.push(Denial { index, message, reason });
        }
    }

    fn annotate(&self, input: &Input<'_>, outcome: &mut Outcome) {
        let session = input.session(&self.shared);
        let mut budget = BUDGET;
        for (key, (source, program)) in &self.annotations {
            match evaluate(&session, input.cost, source, program, &mut budget) {
                Ok(Cel::Null) => {}
                Ok(Cel::String(text)) => {
                    let text = text.trim();
                    if !text.is_empty() {
                        let end = text.floor_char_boundary(MAX_ANNOTATION);
                        outcome.annotations.push((key.clone(), text[..end].to_owned()));
                    }
                }
                Ok(_) => outcome.broken_annotations.push(format!(
                    "valueExpression '{source}' resulted in unsupported return type. Return type must be either string \
                     or null."
                )),
                Err(error) if self.fails => outcome.broken_annotations.push(error),
                Err(_) => {}
            }
        }
    }
}

impl Validation {
    fn read(validation: &Value, expressions: &Expressions) -> Validation {
        let text = |field: &str| validation[field].as_str().unwrap_or_default().trim().to_owned();
        let message = &validation["messageExpression"];
        let reason = text("reason");
        Validation {
            expression: compile(expressions, &validation["expression"], ResultType::Validation),
            message: text("message"),
            message_expression: message
                .as_str()
                .filter(|source| !source.trim().is_empty())
                .map(|_| compile(expressions, message, ResultType::Message)),
            reason: if reason.is_empty() { "Invalid".to_owned() } else { reason },
        }
    }

    /// The result of the messageExpression if it is one usable line, else the message, else the expression.
    fn message<'a>(&'a self, evaluate: impl FnOnce(&'a Compiled) -> Option<Cel<'a>>) -> String {
        if let Some(Cel::String(text)) = self.message_expression.as_ref().and_then(evaluate) {
            let text = text.trim();
            if !text.is_empty() && text.len() <= MAX_MESSAGE && !text.contains('\n') {
                return text.to_owned();
            }
        }
        if self.message.is_empty() {
            return format!("failed expression: {}", self.expression.0.trim());
        }
        self.message.clone()
    }
}

/// Compiles the variables. The text is the error of the first variable that does not compile.
pub(crate) fn read_variables(spec: &Value, has_params: bool) -> (Expressions, Option<String>) {
    let mut expressions = Expressions::with_variables(has_params);
    let mut variable_error = None;
    for variable in spec["variables"].as_array().into_iter().flatten() {
        let name = variable["name"].as_str().unwrap_or_default();
        let source = variable["expression"].as_str().unwrap_or_default();
        if let Err(error) = expressions.add_variable(name, source) {
            variable_error.get_or_insert(format!("variable '{name}': {error}"));
        }
    }
    (expressions, variable_error)
}

pub(crate) fn compile(expressions: &Expressions, source: &Value, expected: ResultType) -> Compiled {
    let source = source.as_str().unwrap_or_default();
    (source.to_owned(), expressions.compile(source, expected))
}

#[cfg(test)]
mod tests;
