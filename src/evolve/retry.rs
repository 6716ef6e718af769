//! How long to wait before the same request is sent again.
//!
//! A server that is busy may say when to come back (`Retry-After`, RFC 9110 section 10.2.3). What it says is believed
//! within bounds: nothing makes a run wait longer than [`MAX_WAIT`] between two attempts.

use std::time::Duration;

/// Longest wait between two attempts.
pub const MAX_WAIT: Duration = Duration::from_secs(30);
/// Wait after the first attempt where the server names none; doubled after each further one.
pub const FIRST_WAIT: Duration = Duration::from_millis(250);

/// The wait after attempt `attempt` (from 0), given the server's `Retry-After`, if any, and the time of day, milliseconds
/// since the Unix epoch. What is neither seconds nor a date to come counts as if the server had named none.
pub fn wait(attempt: u32, retry_after: Option<&str>, now_ms: u64) -> Duration {
    let own = FIRST_WAIT.saturating_mul(1 << attempt.min(16));
    retry_after.and_then(|text| named(text.trim(), now_ms)).unwrap_or(own).min(MAX_WAIT)
}

fn named(text: &str, now_ms: u64) -> Option<Duration> {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than fit are a long time, too.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let left_ms = http_date_ms(text)?.checked_sub(now_ms)?;
    (left_ms > 0).then(|| Duration::from_millis(left_ms))
}

/// Milliseconds since the Unix epoch of a date as servers must write it: `Sun, 06 Nov 1994 08:49:37 GMT`. The two
/// obsolete forms are not read.
fn http_date_ms(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_weekday, rest) = text.split_once(", ")?;
    let [day, month, year, time, "GMT"] = rest.split(' ').collect::<Vec<_>>()[..] else { return None };
    let [hour, minute, second] = time.split(':').collect::<Vec<_>>()[..] else { return None };
    let number = |text: &str, digits: usize, range: std::ops::RangeInclusive<u64>| {
        let fits = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u64>().ok().filter(|n| fits && range.contains(n))
    };
    let month = MONTHS.iter().position(|m| *m == month)? as u64 + 1;
    let (day, year) = (number(day, 2, 1..=31)?, number(year, 4, 1970..=9999)?);
    let seconds = (number(hour, 2, 0..=23)? * 60 + number(minute, 2, 0..=59)?) * 60 + number(second, 2, 0..=60)?;
    // Days since 1970-01-01 in the Gregorian calendar, counted in years that begin with March.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    Some((days.checked_sub(719_468)? * 86_400 + seconds) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 784_111_777_000;

    #[test]
    fn dates_are_those_of_the_standard() {
        // The example of RFC 9110; the others by `date -u -d ... +%s`.
        assert_eq!(http_date_ms("Sun, 06 Nov 1994 08:49:37 GMT"), Some(NOW));
        assert_eq!(http_date_ms("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(http_date_ms("Tue, 29 Feb 2000 23:59:59 GMT"), Some(951_868_799_000));
        assert_eq!(http_date_ms("Wed, 01 Mar 2000 00:00:00 GMT"), Some(951_868_800_000));
        assert_eq!(http_date_ms("Fri, 31 Dec 9999 23:59:59 GMT"), Some(253_402_300_799_000));
        for wrong in [
            "",
            "soon",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Now 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(http_date_ms(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn waits_are_the_servers_within_bounds_or_our_own() {
        let ms = |n| Duration::from_millis(n);
        for (attempt, header, wanted) in [
            (0, None, ms(250)),
            (1, None, ms(500)),
            (6, None, ms(16_000)),
            (7, None, MAX_WAIT),
            (u32::MAX, None, MAX_WAIT),
            (0, Some("0"), ms(0)),
            (5, Some(" 2 "), ms(2_000)),
            (0, Some("31"), MAX_WAIT),
            (0, Some("99999999999999999999999999"), MAX_WAIT),
            (0, Some("-5"), ms(250)),
            (0, Some("1.5"), ms(250)),
            (0, Some(""), ms(250)),
            (1, Some("garbage"), ms(500)),
            (0, Some("Sun, 06 Nov 1994 08:49:40 GMT"), ms(3_000)),
            (0, Some("Sun, 06 Nov 2044 08:49:40 GMT"), MAX_WAIT),
            // Past, or this very moment: clocks differ, and a busy server is not to be hammered.
            (1, Some("Sun, 06 Nov 1994 08:49:37 GMT"), ms(500)),
            (1, Some("Sun, 06 Nov 1994 08:49:30 GMT"), ms(500)),
        ] {
            assert_eq!(wait(attempt, header, NOW), wanted, "{attempt} {header:?}");
        }
    }
}
