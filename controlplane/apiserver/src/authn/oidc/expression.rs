//! CEL expressions of the authentication configuration, over the claims of a token or over the resulting user.
//!
//! Source: `k8s.io/apiserver/pkg/authentication/cel`.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use coracle_cel::{Environment, Field, ObjectType, Program, Session, Shared, Type, Value as Cel};
use coracle_values::CollectMap;
use serde_json::{Value, json};

use super::User;

/// Maximum cost of one expression.
const MAX_COST: u64 = 1_000_000;

static CLAIMS: LazyLock<Type> = LazyLock::new(|| Type::Map(Arc::new(Type::Dyn)));
static USER: LazyLock<Type> = LazyLock::new(user_type);
static NONE: LazyLock<Shared> = LazyLock::new(Shared::default);

/// A compiled expression.
#[derive(Clone, Debug)]
pub(crate) struct Expression {
    pub(super) source: String,
    program: Program,
}

/// The result types that a field accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResultType {
    Bool,
    Text,
    Texts,
}

// === impl Expression ===

impl Expression {
    /// Compiles an expression over `claims`.
    ///
    /// # Errors
    /// The expression does not compile, or has another result type.
    pub(super) fn of_claims(source: &str, wanted: ResultType) -> Result<Self, String> {
        Self::compile(source, wanted, &Environment::default().variable("claims", CLAIMS.clone()))
    }

    /// Compiles an expression over `user`.
    ///
    /// # Errors
    /// The expression does not compile, or has another result type.
    pub(super) fn of_user(source: &str, wanted: ResultType) -> Result<Self, String> {
        Self::compile(source, wanted, &Environment::default().variable("user", USER.clone()))
    }

    fn compile(source: &str, wanted: ResultType, environment: &Environment) -> Result<Self, String> {
        let program = Program::compile(source.trim(), environment).map_err(|error| error.to_string())?;
        let kind = program.kind().to_string();
        let fits = match wanted {
            ResultType::Bool => kind == "bool",
            ResultType::Text => matches!(kind.as_str(), "string" | "dyn"),
            ResultType::Texts => {
                matches!(kind.as_str(), "string" | "dyn" | "list(string)" | "list(dyn)" | "null")
            }
        };
        match fits {
            true => Ok(Self { source: source.to_owned(), program }),
            false => Err(format!("must evaluate to {} but got {kind}", wanted.name())),
        }
    }

    /// Evaluates the expression over the claims. Returns JSON.
    ///
    /// # Errors
    /// The evaluation failed.
    pub(super) fn over_claims(&self, claims: &Value) -> Result<Value, String> {
        self.evaluate("claims", Cel::from_json(claims, &CLAIMS))
    }

    /// Whether the expression is true for the user.
    ///
    /// # Errors
    /// The evaluation failed.
    pub(super) fn is_true_of(&self, user: &User) -> Result<bool, String> {
        let value =
            json!({"username": user.name, "uid": user.uid, "groups": user.groups, "extra": user.extra});
        Ok(self.evaluate("user", Cel::from_json(&value, &USER))? == true)
    }

    fn evaluate(&self, name: &str, value: Cel<'_>) -> Result<Value, String> {
        let session = Session::new(vec![(name, value)], &NONE);
        let (result, _cost) = session.evaluate(&self.program, MAX_COST);
        let failed = |why: &str| format!("expression {:?}: {why}", self.source);
        let value = result.map_err(|error| failed(&error.to_string()))?;
        value.to_limited_json().ok_or_else(|| failed("the result is too large"))
    }
}

// === impl ResultType ===

impl ResultType {
    fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Text => "string",
            Self::Texts => "string or list(string)",
        }
    }
}

fn user_type() -> Type {
    let texts = || Type::list(Type::String);
    let fields = [
        ("username", Type::String),
        ("uid", Type::String),
        ("groups", texts()),
        ("extra", Type::Map(Arc::new(texts()))),
    ];
    let fields =
        fields.into_iter().map(|(name, kind)| (Box::<str>::from(name), Field { name: name.into(), kind }));
    let fields = fields.collect_map::<BTreeMap<_, _>>();
    Type::Object(Arc::new(ObjectType::new("kubernetes.UserInfo", fields)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_an_expression_is_limited() {
        let nested = "claims.roles.all(a, claims.roles.all(b, claims.roles.all(c, true)))";
        let expression = Expression::of_claims(nested, ResultType::Bool).unwrap();
        let with_roles = |count| expression.over_claims(&json!({"roles": vec!["dev"; count]}));
        assert_eq!(with_roles(2), Ok(json!(true)));
        let error = with_roles(300).unwrap_err();
        assert!(error.ends_with("actual cost limit exceeded"), "{error}");
    }
}
