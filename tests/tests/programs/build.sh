# build.sh DIRECTORY FILES: compiles generated files with two compilers at a time, and runs the program.
cd "$1" || exit 1
i=0
main="int main(void) { long s = 0;"
head=""
while [ $i -lt "$2" ]; do
    {
        echo "#include <stdio.h>"
        echo "#include <string.h>"
        j=0
        while [ $j -lt 60 ]; do
            echo "static int g${j}(int a, char *s) { for (int i = 0; i < a; i++) s[i % 64] ^= i * $j; return s[a % 64] + a * $i; }"
            j=$((j + 1))
        done
        echo "long f$i(void) { char s[64]; memset(s, $i, 64); long t = 0;"
        j=0
        while [ $j -lt 60 ]; do echo "t += g$j(t % 50 + $j, s);"; j=$((j + 1)); done
        echo "return t; }"
    } > "f$i.c"
    head="$head long f$i(void);" main="$main s = s * 31 + f$i();"
    i=$((i + 1))
done
printf '#include <stdio.h>\n%s\n%s printf("%%ld\\n", s); return 0; }\n' "$head" "$main" > main.c
rm -f ./*.o program
printf 'program: $(patsubst %%.c,%%.o,$(wildcard *.c))\n\tgcc -o $@ $^\n%%.o: %%.c\n\tgcc -O2 -c -o $@ $<\n' \
    > Makefile
make -j2 -s program && cat f*.o main.o | sha256sum && ./program
