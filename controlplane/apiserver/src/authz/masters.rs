//! `system:masters` may do everything.

use super::Question;

pub(super) fn allows(question: &Question<'_>) -> bool {
    question.user.is_in("system:masters")
}
