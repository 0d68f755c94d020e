//! Stop signals by name and number, as images and the CRI write them. Pure.

use coracle_proto::cri;

/// SIGTERM: the default stop signal.
const TERM: i32 = 15;

/// Names and numbers on x86-64, arm64 and other architectures with the generic layout.
const NAMES: [(&str, i32); 34] = [
    ("ABRT", 6),
    ("ALRM", 14),
    ("BUS", 7),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("FPE", 8),
    ("HUP", 1),
    ("ILL", 4),
    ("INT", 2),
    ("IO", 29),
    ("IOT", 6),
    ("KILL", 9),
    ("PIPE", 13),
    ("POLL", 29),
    ("PROF", 27),
    ("PWR", 30),
    ("QUIT", 3),
    ("SEGV", 11),
    ("STKFLT", 16),
    ("STOP", 19),
    ("SYS", 31),
    ("TERM", 15),
    ("TRAP", 5),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("USR1", 10),
    ("USR2", 12),
    ("VTALRM", 26),
    ("WINCH", 28),
    ("XCPU", 24),
    ("XFSZ", 25),
];
const RT_MIN: i32 = 34;
const RT_MAX: i32 = 64;

/// The signal that stops a container: the request's, else the image's, else TERM.
pub(crate) fn stop_signal(request: cri::Signal, image: &str) -> Result<i32, String> {
    if request != cri::Signal::RuntimeDefault {
        let name = request.as_str_name();
        return number(name).ok_or_else(|| format!("unknown signal {name:?}"));
    }
    if image.is_empty() {
        return Ok(TERM);
    }
    number(image).ok_or_else(|| format!("unknown signal {image:?} in the image"))
}

/// Parses a signal: a number, a name, or a name with `SIG`.
pub(crate) fn number(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=RT_MAX).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase();
    // Names of the CRI are SIGNAL_SIG…, names of images SIG… or without prefix.
    let name = upper.strip_prefix("SIGNAL_").unwrap_or(&upper);
    let name = name.strip_prefix("SIG").unwrap_or(name);
    if let Some((_, number)) = NAMES.iter().find(|(known, _)| *known == name) {
        return Some(*number);
    }
    real_time(name)
}

fn real_time(name: &str) -> Option<i32> {
    let number = if let Some(rest) = name.strip_prefix("RTMIN") {
        RT_MIN + offset(rest, "PLUS", '+')?
    } else {
        RT_MAX - offset(name.strip_prefix("RTMAX")?, "MINUS", '-')?
    };
    (RT_MIN..=RT_MAX).contains(&number).then_some(number)
}

fn offset(rest: &str, word: &str, sign: char) -> Option<i32> {
    if rest.is_empty() {
        return Some(0);
    }
    rest.strip_prefix(word).or_else(|| rest.strip_prefix(sign))?.parse().ok()
}

/// The CRI's name of a signal number.
pub(crate) fn to_cri(signal: i32) -> cri::Signal {
    (1..=i32::from(u8::MAX))
        .map_while(|value| cri::Signal::try_from(value).ok())
        .find(|candidate| number(candidate.as_str_name()) == Some(signal))
        .unwrap_or(cri::Signal::RuntimeDefault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_parsed_from_numbers_and_all_spellings() {
        let cases = [
            ("9", Some(9)),
            ("SIGTERM", Some(15)),
            ("quit", Some(3)),
            ("SIGRTMIN+3", Some(37)),
            ("SIGNAL_SIGRTMAXMINUS2", Some(62)),
            ("SIGRTMIN", Some(34)),
            ("SIGRTMIN+31", None),
            ("0", None),
            ("NOPE", None),
        ];
        for (text, expected) in cases {
            assert_eq!(number(text), expected, "{text}");
        }
    }

    #[test]
    fn the_request_has_precedence_over_the_image_and_the_default() {
        assert_eq!(stop_signal(cri::Signal::Sigint, "SIGQUIT"), Ok(2));
        assert_eq!(stop_signal(cri::Signal::RuntimeDefault, "SIGQUIT"), Ok(3));
        assert_eq!(stop_signal(cri::Signal::RuntimeDefault, ""), Ok(15));
        assert!(stop_signal(cri::Signal::RuntimeDefault, "SIGBAD").is_err());
        assert_eq!(to_cri(15), cri::Signal::Sigterm);
    }
}
