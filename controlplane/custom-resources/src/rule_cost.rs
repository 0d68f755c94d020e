//! Limits on the estimated cost of the rules of a definition.
//!
//! Source: `apiextensions-apiserver/pkg/apis/apiextensions/validation/cel_validation.go`.

use crate::violation::{Path, Violations};

/// Maximum estimated cost of one rule for all values of an object (`StaticEstimatedCostLimit`).
const MAX_RULE: u64 = 10_000_000;

/// Maximum estimated cost of all rules of a version (`StaticEstimatedCRDCostLimit`).
const MAX_TOTAL: u64 = 100_000_000;

/// Maximum number of rules that are reported if the total exceeds its limit. Only rules that cost at least 1 % of the
/// limit are reported.
const MAX_NAMED: usize = 4;

/// The sum of the estimated costs of those rules of a version that were checked so far.
#[derive(Debug, Default)]
pub(crate) struct TotalCost {
    cost: u64,
    /// The most expensive rules in descending order of their costs, at most [`MAX_NAMED`].
    expensive: Vec<(Path, u64)>,
}

// === impl TotalCost ===

impl TotalCost {
    /// Adds the cost of an expression. `name` describes it in messages.
    pub(crate) fn add(&mut self, path: &Path, name: &str, cost: u64, violations: &mut Violations) {
        if cost > MAX_RULE {
            violations.forbidden(path, &exceeded(name, cost, MAX_RULE));
        }
        self.cost = self.cost.saturating_add(cost);
        if cost >= MAX_TOTAL / 100 {
            self.expensive.push((path.clone(), cost));
            self.expensive.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
            self.expensive.truncate(MAX_NAMED);
        }
    }

    /// Reports a total above the limit. `path` is the path of the schema.
    pub(crate) fn report(&self, path: &Path, violations: &mut Violations) {
        if self.cost <= MAX_TOTAL {
            return;
        }
        for (rule, _) in &self.expensive {
            let detail =
                "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema";
            violations.forbidden(rule, detail);
        }
        let name = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
        violations.forbidden(path, &exceeded(name, self.cost, MAX_TOTAL));
    }
}

fn exceeded(name: &str, cost: u64, limit: u64) -> String {
    let factor = cost as f64 / limit as f64;
    let factor = match factor {
        factor if factor > 100.0 => "more than 100x".to_owned(),
        // One digit after the point would show a factor slightly above 1 as 1.0.
        factor if factor < 1.5 => format!("{factor:.6}x"),
        factor => format!("{factor:.1}x"),
    };
    format!(
        "{name} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and \
         maxLength where arrays, maps, and strings are declared)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_above_the_limit_names_the_most_expensive_rules() {
        let (mut total, mut violations) = (TotalCost::default(), Violations::default());
        let path = Path::root("s");
        for (index, cost) in
            [30_000_000, 999_999, 20_000_000, 50_000_000, 1_000_000, 2_000_000].into_iter().enumerate()
        {
            total.add(&path.index(index), "estimated rule cost", cost, &mut violations);
        }
        violations.truncate(0);
        total.report(&path, &mut violations);
        let fields: Vec<&str> = violations.as_slice().iter().map(|cause| cause.field.as_str()).collect();
        assert_eq!(fields, ["s[3]", "s[0]", "s[2]", "s[5]", "s"]);
        let message = &violations.as_slice()[4].message;
        assert!(
            message.starts_with("Forbidden: x-kubernetes-validations estimated rule cost total for entire")
        );
        assert!(message.contains("exceeds budget by factor of 1.040000x (try simplifying"), "{message}");
    }

    #[test]
    fn the_factor_is_printed_as_by_upstream() {
        let factor = |cost: u64| {
            let text = exceeded("cost", cost, MAX_RULE);
            text.split_whitespace().skip(6).take_while(|word| *word != "(try").collect::<Vec<_>>().join(" ")
        };
        assert_eq!(factor(10_000_001), "1.000000x");
        assert_eq!(factor(15_000_000), "1.5x");
        assert_eq!(factor(1_000_000_000), "100.0x");
        assert_eq!(factor(u64::MAX), "more than 100x");
    }
}
