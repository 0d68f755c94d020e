//! The variables of admission expressions, with their types.

use std::sync::{Arc, LazyLock};

use coracle_cel::access::{AUTHORIZER, Access};
use coracle_cel::{
    Environment, EvalError, Field, ObjectType, PER_CALL_LIMIT, Program, Session, Shared, Type, Value as Cel,
};
use serde_json::Value;

use crate::RequestCost;

static REQUEST: LazyLock<Type> = LazyLock::new(request);
static NAMESPACE: LazyLock<Type> = LazyLock::new(namespace);

/// The result that an expression must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultType {
    /// A validation: `bool`.
    Validation,
    /// A message: `string`. It has no variable `authorizer`.
    Message,
    /// The value of an audit annotation: `string` or null.
    Annotation,
    /// An apply configuration: `Object`.
    ApplyConfiguration,
    /// A JSON patch: a list of `JSONPatch`.
    JsonPatch,
}

/// Compiles the expressions of one policy.
#[derive(Debug)]
pub struct Expressions {
    /// The environment with `authorizer`.
    full: Environment,
    /// The environment without `authorizer`.
    message: Environment,
    /// The environment with `authorizer` and the types of patches.
    patch: Environment,
    shared: Shared,
}

/// The variables of the expressions for one request.
#[derive(Clone)]
pub struct Input<'a> {
    /// The AdmissionRequest without its objects.
    pub request: &'a Value,
    /// The object; null for a deletion.
    pub object: &'a Value,
    /// The stored object; null for a new object.
    pub old: &'a Value,
    /// The namespace of the object; null for a cluster-scoped object.
    pub namespace: &'a Value,
    /// The parameter; null if there is none.
    pub params: &'a Value,
    /// Permissions of the user.
    pub authorizer: Access<'a>,
    /// The cost of all expressions of the request.
    pub cost: &'a RequestCost,
}

// === impl Expressions ===

impl Expressions {
    /// The environment of match conditions. `params` is declared if the policy has a `paramKind`.
    pub fn new(has_params: bool) -> Expressions {
        Expressions::of(base(Type::Dyn, has_params.then_some(Type::Dyn)))
    }

    /// The environment of the other expressions of a policy, which also have `variables`.
    pub fn with_variables(has_params: bool) -> Expressions {
        Expressions::of(base(Type::Dyn, has_params.then_some(Type::Dyn)).with_shared())
    }

    fn of(message: Environment) -> Expressions {
        let full = message.clone().variable("authorizer", AUTHORIZER);
        let patch = full.clone().with_structures();
        Expressions { full, message, patch, shared: Shared::default() }
    }

    /// Compiles a variable. Later expressions use it as `variables.name`. In them, a variable that does not compile has
    /// the type `dyn`.
    ///
    /// # Errors
    /// The expression does not compile.
    pub fn add_variable(&mut self, name: &str, source: &str) -> Result<(), String> {
        let program = compiled(source, &self.full);
        for environment in [&mut self.full, &mut self.message, &mut self.patch] {
            match &program {
                Ok(program) => environment.shared(name, program),
                Err(_) => environment.shared_of_any_type(name),
            }
        }
        self.shared.add(name, program?);
        Ok(())
    }

    /// Compiles an expression.
    ///
    /// # Errors
    /// The expression does not compile, or has another type.
    pub fn compile(&self, source: &str, expected: ResultType) -> Result<Program, String> {
        let environment = match expected {
            ResultType::Validation | ResultType::Annotation => &self.full,
            ResultType::Message => &self.message,
            ResultType::ApplyConfiguration | ResultType::JsonPatch => &self.patch,
        };
        let program = compiled(source, environment)?;
        let kind = program.kind().to_string();
        let (fits, wanted) = match expected {
            ResultType::Validation => (kind == "bool", "bool"),
            ResultType::Message => (kind == "string", "string"),
            ResultType::Annotation => (kind == "string" || kind == "null", "one of [string null_type]"),
            ResultType::ApplyConfiguration => (kind == "Object", "Object"),
            // An empty list in a conditional expression has elements of any type. Upstream refuses an
            // expression that consists of an empty list.
            ResultType::JsonPatch => {
                let is_list = kind == "list(dyn)" && source.trim() != "[]";
                (is_list || kind == "list(JSONPatch)", "list(JSONPatch)")
            }
        };
        if fits || kind == "dyn" {
            Ok(program)
        } else {
            Err(format!("must evaluate to {wanted} but got {kind}"))
        }
    }

    /// The compiled variables.
    pub(crate) fn into_shared(self) -> Shared {
        self.shared
    }
}

/// Whether a text is a valid CEL identifier and not a reserved word.
pub fn is_identifier(name: &str) -> bool {
    coracle_cel::escape::escape(name)
        .is_some_and(|escaped| escaped == name || escaped.contains("__underscores__"))
}

fn compiled(source: &str, environment: &Environment) -> Result<Program, String> {
    Program::compile(source, environment).map_err(|error| format!("compilation failed: {error}"))
}

/// The environment of a policy's expressions for objects of this type. `params` is `None` without a `paramKind`.
pub(crate) fn typed(object: Type, params: Option<Type>) -> Environment {
    base(object, params).variable("authorizer", AUTHORIZER).with_shared()
}

fn base(object: Type, params: Option<Type>) -> Environment {
    let environment = Environment::default()
        .variable("object", object.clone())
        .variable("oldObject", object)
        .variable("request", REQUEST.clone())
        .variable("namespaceObject", NAMESPACE.clone());
    match params {
        Some(params) => environment.variable("params", params),
        None => environment,
    }
}

// === impl Input ===

impl<'a> Input<'a> {
    pub(crate) fn session(&self, shared: &'a Shared) -> Session<'a> {
        static DYN: Type = Type::Dyn;
        let variables = vec![
            ("object", Cel::from_json(self.object, &DYN)),
            ("oldObject", Cel::from_json(self.old, &DYN)),
            ("request", Cel::from_json(self.request, &REQUEST)),
            ("namespaceObject", Cel::from_json(self.namespace, &NAMESPACE)),
            ("params", Cel::from_json(self.params, &DYN)),
            ("authorizer", Cel::Access(self.authorizer.clone())),
        ];
        Session::new(variables, shared)
    }
}

/// Evaluates an expression within its own budget and the budget of the request. Errors have upstream's text.
pub(crate) fn evaluate<'a>(
    session: &Session<'a>,
    request: &RequestCost,
    source: &str,
    program: &'a Result<Program, String>,
    budget: &mut u64,
) -> Result<Cel<'a>, String> {
    let program = program.as_ref().map_err(|error| format!("expression '{source}': {error}"))?;
    let left = request.left();
    let (result, cost) = session.evaluate(program, left.min(*budget));
    if left < (*budget).min(PER_CALL_LIMIT) && matches!(result, Err(EvalError::CostLimit)) {
        request.run_out();
    }
    *budget = budget.saturating_sub(cost);
    request.add(cost);
    result.map_err(|error| match error {
        EvalError::CostLimit => {
            "validation failed due to running out of cost budget, no further validation rules will be run"
                .to_owned()
        }
        error => format!("expression '{source}' resulted in error: {error}"),
    })
}

fn object(name: &str, fields: &[(&str, Type)]) -> Type {
    let fields = fields.iter().map(|(name, kind)| {
        let identifier = coracle_cel::escape::escape(name).unwrap_or_default();
        // Upstream spells the identifier of this field in upper case.
        let json = if *name == "UID" { "uid" } else { name };
        (identifier.into_boxed_str(), Field { name: json.into(), kind: kind.clone() })
    });
    Type::Object(Arc::new(ObjectType::new(name, fields.collect())))
}

fn request() -> Type {
    let text = || Type::String;
    let texts = || Type::list(Type::String);
    let kind =
        object("kubernetes.GroupVersionKind", &[("group", text()), ("version", text()), ("kind", text())]);
    let resource = object(
        "kubernetes.GroupVersionResource",
        &[("group", text()), ("version", text()), ("resource", text())],
    );
    let extra = Type::Map(Arc::new(texts()));
    let user = object(
        "kubernetes.UserInfo",
        &[("username", text()), ("uid", text()), ("groups", texts()), ("extra", extra)],
    );
    object(
        "kubernetes.AdmissionRequest",
        &[
            ("kind", kind.clone()),
            ("resource", resource.clone()),
            ("subResource", text()),
            ("requestKind", kind),
            ("requestResource", resource),
            ("requestSubResource", text()),
            ("name", text()),
            ("namespace", text()),
            ("operation", text()),
            ("userInfo", user),
            ("dryRun", Type::Bool),
            ("options", Type::Dyn),
        ],
    )
}

fn namespace() -> Type {
    let text = || Type::String;
    let map = || Type::Map(Arc::new(Type::String));
    let spec = object("kubernetes.NamespaceSpec", &[("finalizers", Type::list(Type::String))]);
    let condition = object(
        "kubernetes.NamespaceCondition",
        &[
            ("status", text()),
            ("type", text()),
            ("lastTransitionTime", Type::Timestamp),
            ("message", text()),
            ("reason", text()),
        ],
    );
    let status =
        object("kubernetes.NamespaceStatus", &[("conditions", Type::list(condition)), ("phase", text())]);
    let metadata = object(
        "kubernetes.NamespaceMetadata",
        &[
            ("name", text()),
            ("generateName", text()),
            ("namespace", text()),
            ("labels", map()),
            ("annotations", map()),
            ("UID", text()),
            ("creationTimestamp", Type::Timestamp),
            ("deletionGracePeriodSeconds", Type::Int),
            ("deletionTimestamp", Type::Timestamp),
            ("generation", Type::Int),
            ("resourceVersion", text()),
            ("finalizers", Type::list(Type::String)),
        ],
    );
    object("kubernetes.Namespace", &[("metadata", metadata), ("spec", spec), ("status", status)])
}
