//! The group `system:masters` has every permission.

use super::Question;

pub(super) fn allows(question: &Question<'_>) -> bool {
    question.user.is_in("system:masters")
}
