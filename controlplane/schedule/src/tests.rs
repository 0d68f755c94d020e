use super::*;

fn next(schedule: &str, after: &str, zone: &str) -> Option<String> {
    let schedule: Schedule = schedule.parse().unwrap();
    schedule.next(after.parse().unwrap(), &zone.parse().unwrap()).map(|next| next.to_string())
}

fn error(text: &str) -> String {
    text.parse::<Schedule>().unwrap_err().to_string()
}

fn check(cases: &[(&str, &str, &str, &str)]) {
    for (schedule, after, zone, expect) in cases {
        let expect = (!expect.is_empty()).then_some(*expect);
        assert_eq!(
            next(schedule, after, zone).as_deref(),
            expect,
            "for {schedule:?} after {after} in {zone}"
        );
    }
}

#[test]
fn the_next_time_follows_fields_descriptors_and_time_zones() {
    let noon = "2026-01-01T12:00:00Z";
    for (schedule, zone, expect) in [
        ("*/5 * * * *", "UTC", "2026-01-01T12:05:00Z"),
        ("30 4 ? * mon", "UTC", "2026-01-05T04:30:00Z"),
        ("0 0 13 * 5", "UTC", "2026-01-02T00:00:00Z"),
        ("@hourly", "UTC", "2026-01-01T13:00:00Z"),
        ("@daily", "UTC", "2026-01-02T00:00:00Z"),
        ("@midnight", "Asia/Tokyo", "2026-01-01T15:00:00Z"),
        ("@weekly", "UTC", "2026-01-04T00:00:00Z"),
        ("@monthly", "UTC", "2026-02-01T00:00:00Z"),
        ("@yearly", "UTC", "2027-01-01T00:00:00Z"),
        ("@annually", "UTC", "2027-01-01T00:00:00Z"),
        ("@every 1h30m", "UTC", "2026-01-01T13:30:00Z"),
        ("@every 1h30m10.5s", "UTC", "2026-01-01T13:30:10Z"),
        ("@every 1.5h", "UTC", "2026-01-01T13:30:00Z"),
        ("@every .5m", "UTC", "2026-01-01T12:00:30Z"),
        ("@every 1.m1500000us500000µs", "UTC", "2026-01-01T12:01:02Z"),
        ("@every 0.0000000000000000000001h", "UTC", "2026-01-01T12:00:01Z"),
        ("@every -1h", "UTC", "2026-01-01T12:00:01Z"),
        ("@every 0", "UTC", "2026-01-01T12:00:01Z"),
        ("0 0 * * *", "Asia/Tokyo", "2026-01-01T15:00:00Z"),
        ("0 0 29 2 *", "UTC", "2028-02-29T00:00:00Z"),
        ("TZ=Asia/Tokyo 0 0 * * *", "America/New_York", "2026-01-01T15:00:00Z"),
        ("CRON_TZ=Asia/Tokyo \t @daily ", "America/New_York", "2026-01-01T15:00:00Z"),
        ("TZ=Asia/Tokyo @every 1h", "America/New_York", "2026-01-01T13:00:00Z"),
        ("TZ= 0 0 * * *", "Asia/Tokyo", "2026-01-02T00:00:00Z"),
        ("TZ=Local 0 0 * * *", "Asia/Tokyo", "2026-01-01T15:00:00Z"),
    ] {
        assert_eq!(next(schedule, noon, zone).as_deref(), Some(expect), "for {schedule}");
    }
    let late = next("@every 1.9s", "2026-01-01T12:00:00.7Z", "UTC");
    assert_eq!(late.as_deref(), Some("2026-01-01T12:00:01Z"), "fractions do not add up");
    let early = next("@every 1s", "1969-12-31T23:59:50.5Z", "UTC");
    assert_eq!(early.as_deref(), Some("1969-12-31T23:59:51Z"), "fractions before 1970");
}

#[test]
fn fields_have_the_same_meaning_as_upstream() {
    check(&[
        ("5/15 * * * *", "2026-01-01T12:00:00Z", "UTC", "2026-01-01T12:05:00Z"),
        ("5/15 * * * *", "2026-01-01T12:50:00Z", "UTC", "2026-01-01T13:05:00Z"),
        ("1-5/2 * * * *", "2026-01-01T12:03:00Z", "UTC", "2026-01-01T12:05:00Z"),
        ("*-5-x * * * *", "2026-01-01T12:03:00Z", "UTC", "2026-01-01T12:04:00Z"),
        ("?/30 * * * *", "2026-01-01T12:03:00Z", "UTC", "2026-01-01T12:30:00Z"),
        ("+5 007 * * *", "2026-01-01T12:03:00Z", "UTC", "2026-01-02T07:05:00Z"),
        ("10,,20, * * * *", "2026-01-01T12:10:00Z", "UTC", "2026-01-01T12:20:00Z"),
        ("59/99999999999 * * * *", "2026-01-01T12:10:00Z", "UTC", "2026-01-01T12:59:00Z"),
        ("0 0 1 Feb-ApR/2 *", "2026-02-01T12:10:00Z", "UTC", "2026-04-01T00:00:00Z"),
        ("0 0 * * sun", "2026-01-01T12:10:00Z", "UTC", "2026-01-04T00:00:00Z"),
        ("0 0 * * SAT,0", "2026-01-01T12:10:00Z", "UTC", "2026-01-03T00:00:00Z"),
        ("\t0\u{a0}0\u{2003}* * *", "2026-01-01T12:00:00Z", "UTC", "2026-01-02T00:00:00Z"),
        // Without a star, a day of the month or a weekday is sufficient. A step above 1 removes the star.
        ("0 0 13 * 5", "2026-01-02T12:00:00Z", "UTC", "2026-01-09T00:00:00Z"),
        ("0 0 13 * */2", "2026-01-01T12:00:00Z", "UTC", "2026-01-03T00:00:00Z"),
        ("0 0 13 * */1", "2026-01-01T12:00:00Z", "UTC", "2026-01-13T00:00:00Z"),
        ("0 0 */5 * 1", "2026-01-01T12:00:00Z", "UTC", "2026-01-05T00:00:00Z"),
        ("0 0 1-31 * 1", "2026-01-01T12:00:00Z", "UTC", "2026-01-02T00:00:00Z"),
        ("0 0 *,5 * 1", "2026-01-01T12:00:00Z", "UTC", "2026-01-05T00:00:00Z"),
        ("0 0 , * 1", "2026-01-01T12:00:00Z", "UTC", "2026-01-05T00:00:00Z"),
        ("* * * * *", "2026-12-31T23:59:59Z", "UTC", "2027-01-01T00:00:00Z"),
        ("* * * * *", "2026-12-31T23:59:00Z", "UTC", "2027-01-01T00:00:00Z"),
        ("0 0 31 12 *", "2026-12-31T00:00:00Z", "UTC", "2027-12-31T00:00:00Z"),
        ("0 0 * * 5", "1969-12-31T23:59:59Z", "UTC", "1970-01-02T00:00:00Z"),
    ]);
}

#[test]
fn a_schedule_that_does_not_fire_within_five_years_has_no_next_time() {
    check(&[
        ("0 0 29 2 *", "2099-03-01T00:00:00Z", "UTC", "2104-02-29T00:00:00Z"),
        ("0 0 29 2 *", "2096-03-01T00:00:00Z", "UTC", ""),
        ("0 0 30 2 *", "2026-01-01T00:00:00Z", "UTC", ""),
        ("0 0 31 2,4,6,9,11 ?", "2026-01-01T00:00:00Z", "UTC", ""),
        // These fields have no numbers.
        (", * * * *", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* , * * *", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* * , * *", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* * * , *", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* * * * ,", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* * , * ,", "2026-01-01T00:00:00Z", "UTC", ""),
        ("* * * * *", "9999-12-30T22:00:00Z", "UTC", ""),
    ]);
}

#[test]
fn times_that_do_not_exist_are_skipped_and_repeated_times_fire_twice() {
    let (york, paulo, howe) = ("America/New_York", "America/Sao_Paulo", "Australia/Lord_Howe");
    check(&[
        ("30 2 * * *", "2026-03-08T05:00:00Z", york, "2026-03-09T06:30:00Z"),
        ("0 2-3 * * *", "2026-03-08T05:00:00Z", york, "2026-03-08T07:00:00Z"),
        ("30 1 * * *", "2026-11-01T04:00:00Z", york, "2026-11-01T05:30:00Z"),
        ("30 1 * * *", "2026-11-01T05:30:00Z", york, "2026-11-01T06:30:00Z"),
        ("30 1 * * *", "2026-11-01T06:30:00Z", york, "2026-11-02T06:30:00Z"),
        // The day begins at one o'clock.
        ("0 0 * * *", "2018-11-03T12:00:00Z", paulo, "2018-11-05T02:00:00Z"),
        ("0 0 * * *", "2018-11-04T12:00:00Z", paulo, "2018-11-05T02:00:00Z"),
        ("30 * * * *", "2018-11-04T02:45:00Z", paulo, "2018-11-04T03:30:00Z"),
        ("0 0 5 11 *", "2018-11-02T12:00:00Z", paulo, "2018-11-05T02:00:00Z"),
        // The clock changes by half an hour.
        ("15 2 * * *", "2026-10-03T12:00:00Z", howe, "2026-10-04T15:15:00Z"),
        ("45 1 * * *", "2026-04-04T12:00:00Z", howe, "2026-04-04T14:45:00Z"),
        ("45 1 * * *", "2026-04-04T14:45:00Z", howe, "2026-04-04T15:15:00Z"),
        ("0 12 * * *", "2026-01-01T06:15:00Z", "Asia/Kathmandu", "2026-01-02T06:15:00Z"),
        // A day does not exist.
        ("0 0 31 12 *", "2011-12-28T12:00:00Z", "Pacific/Apia", "2011-12-30T10:00:00Z"),
        ("0 5 30 12 *", "2011-12-28T12:00:00Z", "Pacific/Apia", "2012-12-29T15:00:00Z"),
    ]);
}

#[test]
fn malformed_schedules_are_refused() {
    for (text, expect) in [
        ("", "empty spec string"),
        ("  ", "expected exactly 5 fields, found 0: []"),
        ("* * *", "expected exactly 5 fields, found 3: [* * *]"),
        (" @daily", "expected exactly 5 fields, found 1: [@daily]"),
        ("0 * * * * *", "expected exactly 5 fields, found 6: [0 * * * * *]"),
        ("@noon", "unrecognized descriptor: @noon"),
        ("@reboot", "unrecognized descriptor: @reboot"),
        ("@Daily", "unrecognized descriptor: @Daily"),
        ("@daily ", "unrecognized descriptor: @daily "),
        ("@every", "unrecognized descriptor: @every"),
        ("@every soon", "failed to parse duration soon"),
        ("TZ=UTC", "invalid schedule format: no space after the time zone in TZ=UTC"),
        ("TZ=0", "invalid schedule format: no space after the time zone in TZ=0"),
        ("TZ=UTC * * * *", "expected exactly 5 fields, found 4: [* * * *]"),
        (
            "TZ=UTC TZ=UTC * * * *",
            "failed to parse int from TZ=UTC: strconv.Atoi: parsing \"TZ=UTC\": invalid syntax",
        ),
        ("TZ=UTC ", "expected exactly 5 fields, found 0: []"),
        ("tz=UTC * * * * *", "expected exactly 5 fields, found 6: [tz=UTC * * * * *]"),
        ("TZ=Mars/Base @daily", "provided bad location Mars/Base: unknown time zone Mars/Base"),
        ("TZ=../UTC @daily", "provided bad location ../UTC: unknown time zone ../UTC"),
    ] {
        assert_eq!(error(text), expect, "for {text:?}");
    }
    for text in
        ["", " ", "1", ".s", "1..5s", "1h 30m", "1d", "--1s", "+", "3000000h", "99999999999999999999s"]
    {
        assert_eq!(error(&format!("@every {text}")), format!("failed to parse duration {text}"));
    }
    assert_eq!("* ".repeat(600).parse::<Schedule>().unwrap_err(), ScheduleError::TooLong);
}

#[test]
fn malformed_fields_are_refused() {
    for (text, expect) in [
        ("60 * * * *", "end of range (60) above maximum (59): 60"),
        ("* 24 * * *", "end of range (24) above maximum (23): 24"),
        ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
        ("* * 32 * *", "end of range (32) above maximum (31): 32"),
        ("* * * 0/5 *", "beginning of range (0) below minimum (1): 0/5"),
        ("* * * * 7", "end of range (7) above maximum (6): 7"),
        ("* * * * fri-7", "end of range (7) above maximum (6): fri-7"),
        ("5-1 * * * *", "beginning of range (5) beyond end of range (1): 5-1"),
        ("70/5 * * * *", "beginning of range (70) beyond end of range (59): 70/5"),
        ("* * * * sat-sun", "beginning of range (6) beyond end of range (0): sat-sun"),
        ("*/0 * * * *", "step of range should be a positive number: */0"),
        ("1/-0 * * * *", "step of range should be a positive number: 1/-0"),
        ("*/-5 * * * *", "negative number (-5) not allowed: -5"),
        ("1-2-3 * * * *", "too many hyphens: 1-2-3"),
        ("1/2/3 * * * *", "too many slashes: 1/2/3"),
        ("*/2/x * * * *", "too many slashes: */2/x"),
        ("-5 * * * *", "failed to parse int from : strconv.Atoi: parsing \"\": invalid syntax"),
        ("/5 * * * *", "failed to parse int from : strconv.Atoi: parsing \"\": invalid syntax"),
        ("*5 * * * *", "failed to parse int from *5: strconv.Atoi: parsing \"*5\": invalid syntax"),
        ("jan * * * *", "failed to parse int from jan: strconv.Atoi: parsing \"jan\": invalid syntax"),
        (
            "* * * * monday",
            "failed to parse int from monday: strconv.Atoi: parsing \"monday\": invalid syntax",
        ),
        ("* * L * *", "failed to parse int from L: strconv.Atoi: parsing \"L\": invalid syntax"),
        ("* * * * 5#2", "failed to parse int from 5#2: strconv.Atoi: parsing \"5#2\": invalid syntax"),
        ("H * * * *", "failed to parse int from H: strconv.Atoi: parsing \"H\": invalid syntax"),
        (
            "9223372036854775808 * * * *",
            "failed to parse int from 9223372036854775808: strconv.Atoi: parsing \"9223372036854775808\": \
             value out of range",
        ),
    ] {
        assert_eq!(error(text), expect, "for {text:?}");
    }
}

#[test]
fn only_names_of_the_database_are_time_zones() {
    for (name, known) in [
        ("UTC", true),
        ("Europe/Berlin", true),
        ("europe/berlin", false),
        ("../etc/passwd", false),
        ("Mars/Base", false),
        ("", false),
    ] {
        assert_eq!(name.parse::<TimeZone>().is_ok(), known, "for {name}");
    }
}
